import math

import pytest

from hvdtrain.settings.safety import limits


def group(root, line, **files):
    """A machine on which this process is in such a control group; files are named from /sys/fs/cgroup on."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


V1 = "7:pids:/\n4:cpu,cpuacct:/docker/3bf3\n2:cpuset:/docker/3bf3\n"


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),  # as a container sees itself
        ("0::/\n", {}, math.inf),
        (
            "0::/kube/pod/c\n",
            {"kube/cpu.max": "400000 100000", "kube/pod/cpu.max": "250000 100000", "kube/pod/c/cpu.max": "max 100000"},
            2.5,
        ),
        (V1, {"cpu/docker/3bf3/cpu.cfs_quota_us": "50000", "cpu/docker/3bf3/cpu.cfs_period_us": "100000"}, 0.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        (V1, {"cpu/cpu.cfs_quota_us": "200000"}, math.inf),
        ("0::/\n", {"cpu.max": "no number"}, math.inf),
        ("0::/\n", {"cpu.max": "100000 0"}, math.inf),
    ],
)
def test_the_quota_is_that_of_the_strictest_group(tmp_path, line, files, quota):
    assert limits.cpu_quota(group(tmp_path, line, **files)) == quota


MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    2000000 kB\n"
V1_MEMORY = "9:memory:/docker/3bf3\n4:cpu,cpuacct:/docker/3bf3\n"


@pytest.mark.parametrize(
    ("line", "files", "memory"),
    [
        ("0::/\n", {"memory.max": "max"}, 16_384_000_000),
        ("0::/kube/pod\n", {"kube/memory.max": "2000000000", "kube/pod/memory.max": "max"}, 2_000_000_000),
        (V1_MEMORY, {"memory/memory.limit_in_bytes": "9223372036854771712"}, 16_384_000_000),  # no limit
        (V1_MEMORY, {"memory/docker/3bf3/memory.limit_in_bytes": "3000000000"}, 3_000_000_000),
    ],
)
def test_the_memory_is_that_of_the_strictest_group_however_much_of_it_is_free(tmp_path, line, files, memory):
    assert (limits.memory_bytes(tmp_path), limits.cpu_quota(tmp_path)) == (math.inf, math.inf)  # without /proc
    root = group(tmp_path, line, **files)
    (root / "proc/meminfo").write_text(MEMINFO)
    assert limits.memory_bytes(root) == memory


@pytest.mark.parametrize(
    ("line", "files", "free"),
    [
        ("0::/\n", {"memory.max": "max", "memory.current": "5"}, 2_048_000_000),
        (
            "0::/pod\n",
            {"pod/memory.max": "900", "pod/memory.current": "700", "pod/memory.stat": "anon 1\ninactive_file 50"},
            250,
        ),
        (V1_MEMORY, {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "700"}, 200),
    ],
)
def test_memory_is_free_as_far_as_the_strictest_group_lets_it_be_used(tmp_path, line, files, free):
    assert limits.free_memory_bytes(tmp_path) == math.inf
    root = group(tmp_path, line, **files)
    (root / "proc/meminfo").write_text(MEMINFO)
    assert limits.free_memory_bytes(root) == free
