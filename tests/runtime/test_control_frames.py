import msgspec
import pytest

from farflung.protocol import messages, wire


def test_a_learner_message_survives_the_wire():
    message = messages.Boundary(
        sequence=3, step=9, tokens=128, loss=2.5, adopted=[(0, 4)], snapshots=[(1, 2)]
    )
    assert wire.decode_learner(wire.encode(message)) == message


def test_a_syncer_message_survives_the_wire_with_what_is_nested_in_it():
    offer = messages.StateOffer(transfer="t", donor="b", num_bytes=4, digest="d")
    message = messages.Install(versions=[1, 2], cursor=3, step=4, syncer_step=5, state=offer, reason="rejoin")
    assert wire.decode_syncer(wire.encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"hello",
        wire.encode(messages.Heartbeat()) + b"\x00",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "StateFailed", "transfer": 1, "reason": "x"}),
        msgspec.msgpack.encode({"type": "StateFailed"}),
        b"\x82\xa4type\xabStateFailed\xa8transfer\xa1\xff",
        b"\x81\xa1x" + b"\x91" * 100_000,
    ],
)
def test_a_malformed_frame_is_a_value_error_of_one_line(data):
    with pytest.raises(ValueError, match=r"^control frame: ") as caught:
        wire.decode_learner(data)
    assert "\n" not in str(caught.value)


def test_each_side_takes_only_what_the_other_may_say():
    with pytest.raises(ValueError):
        wire.decode_learner(wire.encode(messages.Stop(reason="finished")))
    with pytest.raises(ValueError):
        wire.decode_syncer(wire.encode(messages.Heartbeat()))


def test_a_frame_above_one_mib_is_neither_sent_nor_taken():
    with pytest.raises(ValueError, match="at most"):
        wire.encode(messages.Leave(reason="x" * wire.MAX_FRAME_BYTES))
    with pytest.raises(ValueError, match="at most"):
        wire.decode_learner(bytes(wire.MAX_FRAME_BYTES + 1))
