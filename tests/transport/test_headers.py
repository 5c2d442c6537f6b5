"""Headers of messages: what lasts as long as a run is sent once."""

import torch

from penstock.model.pytree import flatten
from penstock.transport.channels import Activation
from penstock.transport.headers import HeaderReader, HeaderWriter
from tests.side_by_side import same_bits


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
