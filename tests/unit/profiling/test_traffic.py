import pytest

from hvdtrain.profiling.traffic import sent_bytes


@pytest.fixture
def host(tmp_path):
    """Of the files that say what was sent, by path."""

    def write(**files):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return sent_bytes(tmp_path)

    return write


def test_only_cards_are_counted_where_there_are_any(host):
    bridge, card = {"net/docker0/statistics/tx_bytes": "70\n"}, {"net/eth0/statistics/tx_bytes": "100\n"}
    assert host(**bridge, **card, **{"net/lo/statistics/tx_bytes": "1000\n"}) == 170
    assert host(**{"net/eth0/device": ""}) == 100


def test_infiniband_counts_words_and_its_interfaces_are_not_counted_twice(host):
    assert host(**{"infiniband/mlx5_0/ports/1/counters/port_xmit_data": "25\n"}) == 100
    assert host(**{"net/ib0/statistics/tx_bytes": "60\n", "net/ib0/device": ""}) == 100
    assert host(**{"net/eth0/statistics/tx_bytes": "7\n", "net/eth0/device": ""}) == 107


def test_a_host_that_does_not_say_is_no_error(host, tmp_path):
    assert sent_bytes(tmp_path) is None
    assert host(**{"net/eth0/statistics/tx_bytes": "none\n"}) is None
