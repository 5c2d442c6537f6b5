"""Headers of messages: broken ones are an error each, and take little memory."""

import random
import tracemalloc
from zlib import crc32

import pytest
import torch

from penstock.errors import MeshError
from penstock.mesh.plain_data import HEAD
from penstock.model.pytree import flatten
from penstock.transport.channels import Activation, Gradient
from penstock.transport.headers import Again, Header, HeaderReader, HeaderWriter
from tests.side_by_side import same_bits


def told(payload: Activation | Gradient) -> bytes:
    return HeaderWriter().write(payload)[1]


def headers() -> list[bytes]:
    leaves, structure = flatten({"kind": 3, "values": (torch.zeros(2, 3), [torch.zeros(4).int()])})
    activation = Activation(
        tuple(leaves), (True, False), structure, (0, 0), frozenset({1}), lasting=frozenset({0})
    )
    return [told(activation), told(Gradient((torch.zeros(5, 2).t(), None)))]


def framed(body: bytes, head: bytes) -> bytes:
    """Put a body under a head whose size and checksum are right."""
    magic = HEAD.unpack_from(head)[0]
    return HEAD.pack(magic, len(body), crc32(body)) + body


def broken(message: bytes, draw: random.Random) -> bytes:
    """Cut a message, or change some of its bytes."""
    if draw.random() < 0.3:
        return message[: draw.randrange(1, len(message))]
    changed = bytearray(message)
    for place in draw.sample(range(len(changed)), draw.randint(1, 4)):
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_ten_thousand_broken_headers_are_an_error_each() -> None:
    draw, known = random.Random(0), headers()
    tracemalloc.start()
    try:
        for _ in range(10_000):
            message = broken(draw.choice(known), draw)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(MeshError):
                HeaderReader().read(0, message)
            assert tracemalloc.get_traced_memory()[1] - before < 64 * len(message) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_header_that_was_changed_on_purpose_is_an_error_or_a_whole_header() -> None:
    draw, known, errors = random.Random(1), headers(), 0
    for _ in range(10_000):
        message = draw.choice(known)
        try:
            found = HeaderReader().read(0, framed(broken(message[HEAD.size :], draw), message))
        except MeshError:
            errors += 1
            continue
        assert found.about is None or len(found.about.wants_grad) == len(found.kinds)
    assert errors > 2_000


def test_a_header_that_was_never_told_is_an_error() -> None:
    with pytest.raises(MeshError, match="names header 7, never told"):
        HeaderReader().read(7, b"")


def test_a_tensor_that_was_never_sent_is_an_error() -> None:
    with pytest.raises(MeshError, match="tensor 3 of those that last"):
        HeaderReader().payload(Header((Again(3),), None), [])


def test_a_weight_is_sent_once_a_run_though_what_changes_it_keeps_its_version() -> None:
    writer, reader, weight = HeaderWriter(), HeaderReader(), torch.zeros(3)
    leaves, structure = flatten([weight])

    def sent() -> list[torch.Tensor]:
        one = Activation(tuple(leaves), (True,), structure, (0,), lasting=frozenset({0}))
        number, told, tensors, _ = writer.write(one)
        arrived = reader.payload(reader.read(number, told), (t.clone() for t in tensors))
        assert same_bits(arrived.leaves[0], weight)
        return tensors

    for _ in range(2):
        assert [len(sent()) for _ in range(3)] == [1, 0, 0]
        weight.data.add_(1.0)  # as optimizers that write to `.data` do
        for end in (writer, reader):
            end.forget_lasting()
