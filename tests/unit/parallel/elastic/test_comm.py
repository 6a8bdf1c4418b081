import pytest
import torch

from hvdtrain.parallel.elastic.comm import ElasticComm, Member, _owner


@pytest.mark.parametrize("values", [torch.zeros(12).as_strided((2, 3), (1, 4), 2), torch.zeros(2).int()])
def test_a_tensor_that_horovod_sums_has_an_owner_besides_python(values):
    """Which owns this very tensor, and nothing as large."""
    owner = _owner(values)
    assert owner.grad is values
    assert owner.untyped_storage().nbytes() == values.element_size()


def test_an_invitation_has_a_number_that_no_rank_has_had(tmp_path):
    comm = ElasticComm.__new__(ElasticComm)
    comm.own_member = Member(number=4, place=1, host="one", pid=7)
    comm.members, comm._hosts, comm._facts, comm._highest_number = [comm.own_member], ["one"] * 3, {}, 4
    invited = [[(one.number, one.place) for one in comm.make_invitations(tmp_path)] for _ in range(2)]
    assert invited == [[(5, 0), (6, 2)], [(7, 0), (8, 2)]]
