from protocol_helpers import RUN, Island, notes, of, posted, said, upload_name

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg

INVITE_1, INVITE_2 = (msg.Invite(fragment=0, round=r) for r in (1, 2))
MERGED_1 = msg.FateOf(fragment=0, round=1, fate="merged")


def sent(round: int = 1) -> Island:
    """Round 1 was snapshotted, uploaded and announced to the syncer; its fate is unknown."""
    island = Island().training()
    island.hear(msg.Invite(fragment=0, round=round))
    island.take_snapshot(round)
    island.take(ev.Uploaded(object=upload_name(round)))
    return island


# ---- birth -----------------------------------------------------------------------------------------------


def test_join_names_who_we_are_and_no_incarnation() -> None:
    island = Island()
    island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
    (join,) = said(island.take(ev.LinkUp()), msg.Join)
    assert (join.learner, join.fingerprint, join.method, join.incarnation) == ("a", "f", "m", None)


def test_a_link_before_the_model_waits_for_the_model() -> None:
    island = Island()
    assert not said(island.take(ev.LinkUp()), msg.Join)
    assert said(island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m")), msg.Join)


def test_a_seeder_says_so_when_every_fragment_is_up() -> None:
    island = Island()
    island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
    island.take(ev.LinkUp())
    island.welcome()
    assert posted(island.hear(msg.SeedRequest()), box.Seed)
    island.report(box.SeedTaken(num_bytes=[4, 4]))
    assert not said(island.take(ev.Uploaded(object="seed.a.1.0")), msg.Seeded)
    assert said(island.take(ev.Uploaded(object="seed.a.1.1")), msg.Seeded)


def test_seeds_of_an_earlier_incarnation_do_not_count() -> None:
    island = Island()
    island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
    for incarnation in (1, 2):
        island.take(ev.LinkUp())
        island.welcome(incarnation)
        island.hear(msg.SeedRequest())
        island.report(box.SeedTaken(num_bytes=[4, 4]))
        if incarnation == 1:
            island.take(ev.LinkDown())
    for p in (0, 1):
        assert not said(island.take(ev.Uploaded(object=f"seed.a.1.{p}")), msg.Seeded), island.story()


def test_nothing_is_loaded_before_every_fragment_and_the_donors_state_are_here() -> None:
    island = Island()
    island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
    island.take(ev.LinkUp())
    island.welcome()
    offer = msg.StateOffer(transfer="a.1.b", donor="b", num_bytes=8, digest="d")
    island.hear(msg.Install(versions=[3, 4], cursor=7, step=9, syncer_step=0, state=offer, reason="rejoin"))
    waiting = [
        ev.Fetched(fragment=0, version=3),
        ev.StateFetched(transfer="another"),
        ev.Fetched(fragment=1, version=2),
        ev.Fetched(fragment=1, version=4),
    ]
    for event in waiting:
        assert not posted(island.take(event), box.Load), island.story()
    (load,) = posted(island.take(ev.StateFetched(transfer="a.1.b")), box.Load)
    assert (load.versions, load.cursor, load.step, load.state) == ([3, 4], 7, 9, True)


def test_state_that_cannot_be_fetched_is_reported() -> None:
    island = Island()
    island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
    island.take(ev.LinkUp())
    island.welcome()
    offer = msg.StateOffer(transfer="a.1.b", donor="b", num_bytes=8, digest="d")
    island.hear(msg.Install(versions=[3, 4], cursor=7, step=9, syncer_step=0, state=offer, reason="rejoin"))
    actions = island.take(ev.StateFetchFailed(transfer="a.1.b", reason="gone"))
    assert said(actions, msg.StateFailed) == [msg.StateFailed(transfer="a.1.b", reason="gone")]


# ---- contributing ----------------------------------------------------------------------------------------


def test_an_invitation_becomes_a_snapshot_an_upload_and_a_message() -> None:
    island = Island().training()
    (snapshot,) = posted(island.hear(INVITE_1), box.Snapshot)
    assert (snapshot.fragment, snapshot.round, snapshot.final) == (0, 1, False)
    (upload,) = of(island.take_snapshot(1), act.Upload)
    assert upload.object == upload_name(1)
    (message,) = said(island.take(ev.Uploaded(object=upload.object)), msg.Contribute)
    assert (message.fragment, message.round, message.base_version, message.tokens) == (0, 1, 0, 10)


def test_a_repeated_invitation_is_answered_once() -> None:
    island = sent()
    assert not island.hear(INVITE_1), island.story()


def test_an_invitation_that_overtakes_the_announcement_does_not_send_merged_work_twice() -> None:
    """Order trap: round 1 was merged; the invitation of round 2 comes before version 1 is here."""
    island = sent()
    island.hear(MERGED_1)
    assert not posted(island.hear(INVITE_2), box.Snapshot), island.story()
    island.announce(1, included=1)
    assert not posted(island.take(ev.Fetched(fragment=0, version=1)), box.Snapshot), island.story()
    actions = island.boundary(adopted=[(0, 1)])
    assert [s.round for s in posted(actions, box.Snapshot)] == [2], island.story()


def test_work_that_was_refused_is_sent_again_at_once() -> None:
    island = sent()
    actions = island.hear(msg.FateOf(fragment=0, round=1, fate="late"))
    assert [s.merged for s in posted(actions, box.Settle)] == [False]
    assert [s.round for s in posted(island.hear(INVITE_2), box.Snapshot)] == [2], island.story()


def test_under_rebase_an_adoption_that_lacks_the_merged_work_does_not_free_it() -> None:
    island = Island(adoption="rebase").training()
    island.hear(INVITE_1)
    island.take_snapshot(1)
    island.take(ev.Uploaded(object=upload_name(1)))
    island.announce(1, included=None)  # closed without us
    island.take(ev.Fetched(fragment=0, version=1))
    island.hear(MERGED_1)  # merged into version 2
    island.hear(INVITE_2)
    assert not posted(island.boundary(adopted=[(0, 1)]), box.Snapshot), island.story()
    island.announce(2, included=1)
    island.take(ev.Fetched(fragment=0, version=2))
    assert posted(island.boundary(adopted=[(0, 2)]), box.Snapshot), island.story()


def test_an_upload_is_cancelled_when_its_round_is_over() -> None:
    island = Island().training()
    island.hear(INVITE_1)
    island.take_snapshot(1)
    actions = island.hear(INVITE_2)
    assert [c.object for c in of(actions, act.CancelUpload)] == [upload_name(1)], island.story()
    assert [s.merged for s in posted(actions, box.Settle)] == [False]
    assert [s.round for s in posted(actions, box.Snapshot)] == [2]


def test_an_upload_that_ends_after_its_cancellation_is_not_announced() -> None:
    island = Island().training()
    island.hear(INVITE_1)
    island.take_snapshot(1)
    island.hear(INVITE_2)
    assert not said(island.take(ev.Uploaded(object=upload_name(1))), msg.Contribute), island.story()


def test_a_failed_upload_gives_the_slot_back() -> None:
    island = Island().training()
    island.hear(INVITE_1)
    island.take_snapshot(1)
    actions = island.take(ev.UploadFailed(object=upload_name(1), reason="no space"))
    assert [s.merged for s in posted(actions, box.Settle)] == [False]
    assert posted(island.hear(INVITE_2), box.Snapshot), island.story()


def test_a_repeated_fate_changes_nothing() -> None:
    island = sent()
    assert posted(island.hear(MERGED_1), box.Settle)
    assert not island.hear(MERGED_1), island.story()
    assert not island.hear(msg.FateOf(fragment=0, round=1, fate="late")), island.story()


# ---- adopting --------------------------------------------------------------------------------------------


def test_an_announcement_is_fetched_and_then_adopted() -> None:
    island = Island().training()
    assert [(f.fragment, f.version) for f in of(island.announce(1), act.Fetch)] == [(0, 1)]
    (adopt,) = posted(island.take(ev.Fetched(fragment=0, version=1)), box.Adopt)
    assert (adopt.version, adopt.included, adopt.at_step) == (1, None, 0)


def test_of_the_versions_announced_meanwhile_only_the_newest_is_fetched() -> None:
    island = Island().training()
    island.announce(1)
    for version in (2, 3):
        assert not of(island.announce(version), act.Fetch), island.story()  # the slot is in use
    island.take(ev.Fetched(fragment=0, version=1))
    (fetch,) = of(island.boundary(adopted=[(0, 1)]), act.Fetch)
    assert fetch.version == 3, island.story()


def test_a_version_that_is_gone_is_replaced_by_the_newest() -> None:
    island = Island().training()
    island.announce(1)
    island.announce(3)
    gone = ev.FetchFailed(fragment=0, version=1, reason="gone", gone=True)
    assert [f.version for f in of(island.take(gone), act.Fetch)] == [3], island.story()


def test_a_version_that_is_gone_without_a_newer_one_is_asked_for_again_later() -> None:
    island = Island().training()
    island.announce(1)
    actions = island.take(ev.FetchFailed(fragment=0, version=1, reason="gone", gone=True))
    assert [t.name for t in of(actions, act.SetTimer)] == ["fetch.0"]
    assert [f.version for f in of(island.take(ev.TimerFired(name="fetch.0")), act.Fetch)] == [1], (
        island.story()
    )


def test_an_old_announcement_changes_nothing() -> None:
    island = Island().training()
    island.announce(2)
    island.take(ev.Fetched(fragment=0, version=2))
    island.boundary(adopted=[(0, 2)])
    assert not of(island.announce(1), act.Fetch), island.story()


def test_free_pace_never_makes_the_trainer_wait() -> None:
    island = sent()
    island.announce(5)
    limits = [r.data["command"] for r in island.tape.records if r.type == "Post"]
    limits = [c["step"] for c in limits if c["type"] == "RunUntil"]
    assert set(limits) == {None}, island.story()


def test_lockstep_posts_snapshots_ahead_and_waits_with_a_reason() -> None:
    island = Island(pace="lockstep", num_fragments=1, overlap_steps=1, quorum="all").training()
    commands = [r.data["command"] for r in island.tape.records if r.type == "Post"]
    assert [(c["round"], c["at_step"]) for c in commands if c["type"] == "Snapshot"] == [(1, 4)]
    last = [c for c in commands if c["type"] == "RunUntil"][-1]
    assert (last["step"], last["reason"]) == (5, "waiting for version 1 of fragment 0"), island.story()
    island.announce(1, included=1)
    actions = island.take(ev.Fetched(fragment=0, version=1))
    assert [a.at_step for a in posted(actions, box.Adopt)] == [5]
    assert [s.at_step for s in posted(actions, box.Snapshot)] == [8]
    assert [r.step for r in posted(actions, box.RunUntil)] == [9]


def test_a_learner_with_a_lead_limit_stops_ahead_of_the_syncer_with_a_reason() -> None:
    island = Island(max_lead_steps=3).training()
    commands = [r.data["command"] for r in island.tape.records if r.type == "Post"]
    last = [c for c in commands if c["type"] == "RunUntil"][-1]
    assert (last["step"], last["reason"]) == (3, "too far ahead of the syncer")
    actions = island.hear(msg.Announce(fragment=0, version=1, included=None, syncer_step=2))
    assert [r.step for r in posted(actions, box.RunUntil)] == [5]


# ---- the link --------------------------------------------------------------------------------------------


def test_training_goes_on_while_the_link_is_down_and_nothing_is_said() -> None:
    island = Island().training()
    assert of(island.take(ev.LinkDown()), act.Connect)
    for _ in range(3):
        actions = island.boundary()
        assert not of(actions, act.Say), island.story()
        assert not posted(actions, box.RunUntil)


def test_boundaries_are_repeated_after_reattaching_exactly_once() -> None:
    island = Island().training()
    island.boundary()
    island.boundary()
    island.take(ev.LinkDown())
    island.boundary()
    (join,) = said(island.take(ev.LinkUp()), msg.Join)
    assert (join.incarnation, join.sequence) == (1, 3)
    island.boundary()  # not yet attached: the syncer would not know what came before
    island.welcome()
    actions = island.hear(msg.Reattached(installed=True, sequence=1, syncer_step=0))
    assert [b.sequence for b in said(actions, msg.Boundary)] == [2, 3, 4], island.story()
    assert [b.sequence for b in said(island.boundary(), msg.Boundary)] == [5]


def test_acknowledged_boundaries_are_forgotten() -> None:
    island = Island().training()
    for _ in range(8):
        island.boundary()
    island.hear(msg.Progress(tokens=80, sequence=8))
    assert not island.machine.unacked


def test_a_contribution_without_a_fate_is_repeated_after_reattaching() -> None:
    island = sent()
    island.take(ev.LinkDown())
    island.take(ev.LinkUp())
    island.welcome()
    actions = island.hear(msg.Reattached(installed=True, sequence=0, syncer_step=0))
    kinds = [type(m).__name__ for m in said(actions, msg.Boundary | msg.Contribute)]  # type: ignore[arg-type]
    assert kinds == ["Boundary", "Contribute"], island.story()  # the snapshot before the contribution


def test_a_contribution_with_a_fate_is_not_repeated() -> None:
    island = sent()
    island.hear(MERGED_1)
    island.take(ev.LinkDown())
    island.take(ev.LinkUp())
    island.welcome()
    actions = island.hear(msg.Reattached(installed=True, sequence=1, syncer_step=0))
    assert not said(actions, msg.Contribute), island.story()


def test_the_proof_of_an_installation_is_repeated_if_it_did_not_arrive() -> None:
    island = Island().training()
    island.take(ev.LinkDown())
    island.take(ev.LinkUp())
    island.welcome()
    actions = island.hear(msg.Reattached(installed=False, sequence=0, syncer_step=0))
    assert [m.versions for m in said(actions, msg.Installed)] == [[0, 0]], island.story()


def test_an_upload_that_ends_while_the_link_is_down_is_announced_later() -> None:
    island = Island().training()
    island.hear(INVITE_1)
    island.take_snapshot(1)
    island.take(ev.LinkDown())
    assert not of(island.take(ev.Uploaded(object=upload_name(1))), act.Say)
    island.take(ev.LinkUp())
    island.welcome()
    actions = island.hear(msg.Reattached(installed=True, sequence=1, syncer_step=0))
    assert [m.round for m in said(actions, msg.Contribute)] == [1], island.story()


# ---- reset -----------------------------------------------------------------------------------------------


def reset(island: Island) -> list[act.LearnerAction]:
    return island.hear(msg.Stop(reason="reset"))


def test_a_reset_stops_the_trainer_and_joins_as_a_new_incarnation() -> None:
    island = sent()
    actions = reset(island)
    assert [r.step for r in posted(actions, box.RunUntil)] == [0]
    assert [j.incarnation for j in said(actions, msg.Join)] == [None], island.story()


def test_a_reset_cancels_what_is_on_its_way_up() -> None:
    island = Island().training()
    island.hear(INVITE_1)
    island.take_snapshot(1)
    assert [c.object for c in of(reset(island), act.CancelUpload)] == [upload_name(1)], island.story()


def test_the_step_under_way_at_a_reset_belongs_to_nobody() -> None:
    island = sent()
    reset(island)
    taken = [box.Taken(fragment=1, round=1, base_version=0, steps=1, tokens=10, num_bytes=4)]
    assert not island.boundary(taken=taken), island.story()
    assert not island.machine.unacked


def test_after_a_reset_the_trainer_runs_again_from_what_it_installed() -> None:
    island = sent()
    reset(island)
    island.welcome(incarnation=2)
    actions = island.install([4, 4])
    assert next(r.step for r in posted(actions, box.RunUntil)) is None
    assert [m.versions for m in said(actions, msg.Installed)] == [[4, 4]], island.story()
    assert [b.sequence for b in said(island.boundary(), msg.Boundary)] == [1]


def test_an_installation_that_was_overtaken_by_another_proves_nothing() -> None:
    """The trainer is slow: the link fell and rose, and a second `Load` is posted before the first is done."""
    island = Island()
    island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
    plain = {"cursor": 0, "step": 0, "syncer_step": 0, "state": None, "reason": "cold"}
    proof = {"digests": ["d", "d"], "inner_digest": None, "lr": None, "cursor": 0, "step": 0}
    for incarnation, version in ((1, 3), (2, 4)):
        island.take(ev.LinkUp())
        island.welcome(incarnation)
        island.hear(msg.Install(versions=[version] * 2, **plain))
        for p in (0, 1):
            island.take(ev.Fetched(fragment=p, version=version))
        if incarnation == 1:
            island.take(ev.LinkDown())
    assert not said(island.report(box.Loaded(versions=[3, 3], **proof)), msg.Installed), island.story()
    actions = island.report(box.Loaded(versions=[4, 4], **proof))
    assert [m.versions for m in said(actions, msg.Installed)] == [[4, 4]], island.story()


# ---- the end ---------------------------------------------------------------------------------------------


def test_a_hand_in_adopts_the_newest_versions_before_its_last_snapshots() -> None:
    island = Island().training()
    actions = island.hear(msg.Finish(versions=[1, 0], rounds=[2, 1]))
    assert [r.step for r in posted(actions, box.RunUntil)] == [0]
    assert not posted(actions, box.Snapshot), island.story()
    island.take(ev.Fetched(fragment=0, version=1))
    actions = island.boundary(tokens=0, adopted=[(0, 1)])
    assert [(s.fragment, s.round, s.final) for s in posted(actions, box.Snapshot)] == [
        (0, 2, True),
        (1, 1, True),
    ]


def test_a_hand_in_is_done_when_every_fragment_was_sent_or_had_nothing_to_send() -> None:
    island = Island().training()
    island.hear(msg.Finish(versions=[0, 0], rounds=[1, 1]))
    taken = [box.Taken(fragment=0, round=1, base_version=0, steps=1, tokens=10, num_bytes=4)]
    assert not said(island.boundary(tokens=0, taken=taken, skipped=[1]), msg.HandedIn)
    actions = island.take(ev.Uploaded(object=upload_name(1)))
    assert said(actions, msg.HandedIn), island.story()


def test_a_suspended_learner_gives_its_work_back_saves_and_says_so() -> None:
    island = sent()
    actions = island.hear(msg.Suspend())
    assert [s.merged for s in posted(actions, box.Settle)] == [False]
    assert posted(actions, box.Save)
    assert said(island.report(box.SaveDone(step=1)), msg.Saved), island.story()


def test_a_stop_ends_the_trainer_and_the_process() -> None:
    island = Island().training()
    actions = island.hear(msg.Stop(reason="finished"))
    assert [e.reason for e in posted(actions, box.End)] == ["finished"]
    assert [(e.reason, e.ok) for e in of(actions, act.Exit)] == [("finished", True)]
    assert not island.boundary()


def test_a_refusal_is_shown_and_ends_the_process() -> None:
    island = Island()
    island.report(box.Ready(learner="a", fingerprint="f", layout="{}", method="m"))
    island.take(ev.LinkUp())
    actions = island.hear(msg.Refused(reason="method", detail="your method is m, this run uses n"))
    assert notes(actions, "refused")
    (left,) = of(actions, act.Exit)
    assert not left.ok
    assert "this run uses n" in left.reason


def test_a_dead_trainer_is_reported_at_once() -> None:
    island = Island().training()
    actions = island.take(ev.TrainerGone(reason="signal 9"))
    assert said(actions, msg.TrainerLost) == [msg.TrainerLost(reason="signal 9")]
    assert [e.ok for e in of(actions, act.Exit)] == [False]


# ---- donating --------------------------------------------------------------------------------------------


def test_a_donors_state_is_uploaded_and_then_announced() -> None:
    island = Island().training()
    assert posted(island.hear(msg.Donate(transfer="b.1.a")), box.Donate)
    donated = box.Donated(transfer="b.1.a", num_bytes=8, digest="d", lr=0.1, step=5)
    assert [u.object for u in of(island.report(donated), act.Upload)] == ["state.b.1.a"]
    (ready,) = said(island.take(ev.Uploaded(object="state.b.1.a")), msg.StateReady)
    assert (ready.transfer, ready.digest, ready.held) == ("b.1.a", "d", [0, 0])


def test_a_busy_donor_says_so() -> None:
    island = Island().training()
    island.hear(msg.Donate(transfer="b.1.a"))
    (failed,) = said(island.hear(msg.Donate(transfer="c.1.a")), msg.StateFailed)
    assert failed.transfer == "c.1.a"


def test_everything_said_belongs_to_the_run() -> None:
    assert Island().training().machine.run == RUN
