from farflung.protocol.membership import Member, Membership
from farflung.protocol.messages import Boundary


def boundary(sequence: int, **changes: float) -> Boundary:
    return Boundary(**{"sequence": sequence, "step": sequence, "tokens": 10, "step_s": 0.5, **changes})  # type: ignore[arg-type]


def test_every_process_of_a_name_is_a_new_incarnation_with_the_old_index() -> None:
    members = Membership(2)
    first = members.enter("a", 1)
    members.enter("b", 2)
    assert (first.incarnation, first.index) == (1, 0)
    again = members.enter("a", 3)
    assert (again.incarnation, again.index) == (2, 0)


def test_a_new_incarnation_keeps_cursor_and_totals_and_nothing_else() -> None:
    members = Membership(2)
    member = members.enter("a", 1)
    member.count(boundary(1, cursor=7), now=1.0)
    member.held, member.announced, member.included = [3, 3], [3, 3], [3, None]
    member.merged, member.non_finite = 2, [1, 1]
    members.enter("a", 2)
    assert (member.cursor, member.steps_done, member.tokens) == (7, 1, 10)
    assert (member.sequence, member.merged, member.non_finite, member.step_s.value) == (0, 0, [0, 0], None)
    assert (member.announced, member.included) == ([-1, -1], [None, None])


def test_a_new_connection_replaces_the_old_one() -> None:
    members = Membership(1)
    member = members.enter("a", 1)
    members.bind(member, 2)
    assert members.of(1) is None
    assert members.of(2) is member
    members.unbind(1)
    assert member.connection == 2


def test_the_end_of_a_replaced_connection_does_not_unbind_the_new_one() -> None:
    members = Membership(1)
    member = members.enter("a", 1)
    members.bind(member, 2)
    members.connections[1] = "a"  # the old socket's end is heard late
    members.unbind(1)
    assert member.connection == 2


def test_a_wait_that_ends_is_no_step() -> None:
    member = Member("a", 0)
    member.count(boundary(1, tokens=0, step_s=0.0), now=1.0)
    assert (member.steps_done, member.step_s.value, member.sequence) == (0, None, 1)


def test_a_lease_lives_until_it_lapses() -> None:
    member = Member("a", 0, state="training", lease_until_s=5.0)
    assert member.live(5.0)
    assert not member.live(5.1)


def test_a_gone_member_is_not_alive_whatever_its_lease() -> None:
    assert not Member("a", 0, state="gone", lease_until_s=5.0).live(1.0)


def test_long_steps_are_progress_for_three_of_them() -> None:
    member = Member("a", 0, state="training", lease_until_s=1e9)
    assert not member.progressing(0.0, 1.0)
    member.count(boundary(1, step_s=60.0), now=0.0)
    assert member.progressing(180.0, 1.0)
    assert not member.progressing(181.0, 1.0)


def test_members_are_listed_by_name() -> None:
    members = Membership(1)
    for connection, name in enumerate(["c", "a", "b"]):
        members.enter(name, connection).state = "training"
    assert [m.name for m in members.training()] == ["a", "b", "c"]
