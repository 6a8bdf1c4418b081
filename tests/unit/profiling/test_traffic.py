import pytest

from hvdtrain.profiling.traffic import sent_bytes

ETHERNET, CARD = {"net/eth0/statistics/tx_bytes": "100\n"}, {"net/eth0/device": ""}
BRIDGE = {"net/docker0/statistics/tx_bytes": "70\n", "net/lo/statistics/tx_bytes": "1000\n"}
INFINIBAND = {"infiniband/mlx5_0/ports/1/counters/port_xmit_data": "25\n"}  # words of 4 bytes
OVER_INFINIBAND = {"net/ib0/statistics/tx_bytes": "60\n", "net/ib0/device": ""}


@pytest.mark.parametrize(
    ("files", "sent"),
    [
        ({}, None),
        ({"net/eth0/statistics/tx_bytes": "none\n"}, None),
        (BRIDGE | ETHERNET, 170),
        (BRIDGE | ETHERNET | CARD, 100),  # only cards, if there are any
        (INFINIBAND, 100),
        (INFINIBAND | OVER_INFINIBAND, 100),  # not twice
        (INFINIBAND | OVER_INFINIBAND | ETHERNET | CARD, 200),
    ],
)
def test_what_a_host_has_sent(tmp_path, files, sent):
    for path, text in files.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert sent_bytes(tmp_path) == sent
