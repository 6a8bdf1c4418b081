"""Trees of PCIe of real machines, by what their owners published, as folders like those of /sys."""

from pathlib import Path

# Eight H800 behind a switch each with an adapter and a disk, and a disk at a root port (`lspci -tv` at
# github.com/LiangZhou9527/some_stuff, which does not tell NUMA nodes; buses from 80 on are those of the second socket).
H800 = {
    **{
        f"0000:{bus}:00.0": (f"pci0000:{root}/0000:{root}:01.0/0000:{switch}:00.0/0000:{inside}:{port}.0", name)
        for root, switch, inside, places in (
            ("15", "16", "17", ("18", "19", "1a")),
            ("37", "38", "39", ("41", "3a", "42")),
            ("48", "49", "4a", ("4b", "4c", "4d")),
            ("59", "5a", "5b", ("5d", "5c", "5e")),
            ("97", "98", "99", ("9a", "9b", "9c")),
            ("b7", "b8", "b9", ("bb", "ba", "bc")),
            ("c7", "c8", "c9", ("ca", "cb", "cc")),
            ("d7", "d8", "d9", ("db", "da", "dc")),
        )
        for bus, name in zip(places, ("GPU", "mlx5", "nvme"), strict=True)
        for port in (f"{sorted(places).index(bus):02x}",)
    },
    "0000:28:00.0": ("pci0000:26/0000:26:05.0", "nvme"),
}
# A workstation with two sockets, four RTX 6000 Ada at root ports, a disk at another, and disks on cards with switches
# behind a switch (ASUS ESC8000A-E12, `lspci -tv` and `numactl` at github.com/luigifcruz/stelline).
RTX6000 = {
    **{f"0000:{root[:1]}1:00.0": (f"pci0000:{root}/0000:{root}:01.1", "GPU") for root in ("00", "40", "c0", "e0")},
    "0000:02:00.0": ("pci0000:00/0000:00:05.1", "nvme"),
    "0000:65:00.0": ("pci0000:60/0000:60:01.1/0000:61:00.0/0000:62:00.0/0000:63:00.0/0000:64:10.0", "nvme"),
    "0000:6b:00.0": ("pci0000:60/0000:60:01.1/0000:61:00.0/0000:62:04.0/0000:69:00.0/0000:6a:00.0", "nvme"),
    "0000:a5:00.0": ("pci0000:a0/0000:a0:01.1/0000:a1:00.0/0000:a2:00.0/0000:a3:00.0/0000:a4:10.0", "nvme"),
}
# A virtual machine shows no switch: devices are at root complexes (p4d.24xlarge, topology/p4d-24xl-topo.xml of
# github.com/aws/aws-ofi-nccl, which has no disks).
P4D = {
    f"0000:{bus}:{device}.0": (f"pci0000:{bus}", name)
    for bus in ("10", "20", "90", "a0")
    for device, name in (("1b", "nic"), ("1c", "GPU"), ("1d", "GPU"))
}
CLASSES = {"GPU": "0x030200", "mlx5": "0x020700", "nvme": "0x010802", "nic": "0x020000"}


def gpus_of(machine: dict[str, tuple[str, str]]) -> list[str]:
    """The addresses of its GPUs."""
    return sorted(address for address, (_, name) in machine.items() if name == "GPU")


def write_sysfs(folder: Path, machine: dict[str, tuple[str, str]]) -> Path:
    """The folder as /sys of that machine; adapters and disks are numbered by their addresses."""
    counts: dict[str, int] = {}
    (folder / "bus/pci/devices").mkdir(parents=True)
    for address, (bridges, name) in sorted(machine.items()):
        device = folder / "devices" / bridges / address
        device.mkdir(parents=True)
        on_first = bridges[len("pci0000:")] in "01234567"
        for place in (device, *device.parents):
            if place.name.count(":") == 2:
                (place / "numa_node").write_text("0\n" if on_first else "1\n")
        (device / "class").write_text(f"{CLASSES[name]}\n")
        (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
        (device / "current_link_speed").write_text("2.5 GT/s PCIe\n" if name == "GPU" else "16.0 GT/s PCIe\n")
        (device / "current_link_width").write_text("4\n" if name == "nvme" else "16\n")
        (folder / "bus/pci/devices" / address).symlink_to(device)
        number = counts[name] = counts.get(name, -1) + 1
        if name == "nvme":
            write_disk(folder, device, number, f"nvme{number}n1")
        elif name == "mlx5":
            (folder / f"class/infiniband/mlx5_{number}").mkdir(parents=True)
            (folder / f"class/infiniband/mlx5_{number}/device").symlink_to(device)
    return folder


def write_disk(folder: Path, device: Path, number: int, *namespaces: str) -> None:
    """A controller of disks, with these namespaces."""
    controller = device / f"nvme/nvme{number}"
    for namespace in namespaces:
        (controller / namespace).mkdir(parents=True)
    (controller / "device").symlink_to(device)
    (folder / "class/nvme").mkdir(parents=True, exist_ok=True)
    (folder / f"class/nvme/nvme{number}").symlink_to(controller)
