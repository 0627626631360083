"""Control messages as bytes: msgpack frames of `farflung.protocol.messages`, typed on the way in.

A frame is decoded into its declared type or not at all, so everything behind this file may trust it.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from farflung.protocol.messages import LearnerMessage, Message, SyncerMessage
from farflung.units import MIB

T = TypeVar("T")
MAX_FRAME_BYTES = 1 * MIB  # control is bytes, never megabytes

_encoder = msgspec.msgpack.Encoder()
_learner_decoder = msgspec.msgpack.Decoder(LearnerMessage)
_syncer_decoder = msgspec.msgpack.Decoder(SyncerMessage)


def encode(message: Message) -> bytes:
    """One message as a frame.

    Raises:
        ValueError: the frame would exceed MAX_FRAME_BYTES.

    >>> from farflung.protocol.messages import Heartbeat
    >>> decode_learner(encode(Heartbeat()))
    Heartbeat()
    """
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        name = type(message).__name__
        raise ValueError(f"control frame: {name} of {len(data)} bytes, at most {MAX_FRAME_BYTES} allowed")
    return data


def decode_learner(data: bytes) -> LearnerMessage:
    """What a learner said. Raises ValueError with one line when the frame is malformed."""
    return _decode(_learner_decoder.decode, data)


def decode_syncer(data: bytes) -> SyncerMessage:
    """What a syncer said. Raises ValueError with one line when the frame is malformed."""
    return _decode(_syncer_decoder.decode, data)


def _decode(decode: Callable[[bytes], T], data: bytes) -> T:
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"control frame: {len(data)} bytes, at most {MAX_FRAME_BYTES} allowed")
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"control frame: {' '.join(str(error).split())}") from None
