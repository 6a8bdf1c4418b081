import pytest
import torch

from hvdtrain.elastic.comm import _owner


@pytest.mark.parametrize("values", [torch.zeros(12).as_strided((2, 3), (1, 4), 2), torch.zeros(2).int()])
def test_a_tensor_that_horovod_sums_has_an_owner_besides_python(values):
    """Which owns this very tensor, and nothing as large."""
    owner = _owner(values)
    assert owner.grad is values
    assert owner.untyped_storage().nbytes() == values.element_size()
