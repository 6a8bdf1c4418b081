import pytest

from hvdtrain.safety.exits import BadInput
from hvdtrain.vision.settings import parse


def test_buckets_have_no_groups():
    with pytest.raises(BadInput, match=r"^--fusion-groups 4 requires --reducer horovod$"):
        parse(["--fusion-groups", "4"])
    assert parse(["--reducer", "horovod", "--fusion-groups", "4"]).fusion_groups == 4
    assert parse(["--reducer", "bucket", "--fusion-threshold-mb", "0"]).reducer == "bucket"
