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
CLASSES = {"GPU": "0x030200", "mlx5": "0x020700", "nvme": "0x010802"}


def gpus_of(machine: dict[str, tuple[str, str]]) -> list[str]:
    """The addresses of its GPUs."""
    return sorted(address for address, (_, name) in machine.items() if name == "GPU")


def write_device(folder: Path, bridges: str, address: str, numa: int) -> Path:
    """A device below these bridges, in a folder like /sys."""
    device = folder / "devices" / bridges / address
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{numa}\n")
    (folder / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (folder / "bus/pci/devices" / address).symlink_to(device)
    return device


def write_adapter(folder: Path, name: str, device: Path) -> None:
    """An InfiniBand adapter."""
    (folder / "class/infiniband" / name).mkdir(parents=True)
    (folder / "class/infiniband" / name / "device").symlink_to(device)


def write_sysfs(folder: Path, machine: dict[str, tuple[str, str]]) -> Path:
    """The folder as /sys of that machine; adapters and disks are numbered by their addresses."""
    counts: dict[str, int] = {}
    for address, (bridges, name) in sorted(machine.items()):
        numa = int(bridges[len("pci0000:")] not in "01234567")
        device = write_device(folder, bridges, address, numa)
        for place in device.parents:
            if place.name.count(":") == 2:
                (place / "numa_node").write_text(f"{numa}\n")
        (device / "class").write_text(f"{CLASSES[name]}\n")
        (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
        (device / "current_link_speed").write_text("2.5 GT/s PCIe\n" if name == "GPU" else "16.0 GT/s PCIe\n")
        (device / "current_link_width").write_text("4\n" if name == "nvme" else "16\n")
        number = counts[name] = counts.get(name, -1) + 1
        if name == "nvme":
            write_disk(folder, device, number, f"nvme{number}n1")
        elif name == "mlx5":
            write_adapter(folder, f"mlx5_{number}", device)
    return folder


def write_disk(folder: Path, device: Path, number: int, *namespaces: str) -> None:
    """A controller of disks, with these namespaces."""
    controller = device / f"nvme/nvme{number}"
    for namespace in namespaces:
        (controller / namespace).mkdir(parents=True)
    (controller / "device").symlink_to(device)
    (folder / "class/nvme").mkdir(parents=True, exist_ok=True)
    (folder / f"class/nvme/nvme{number}").symlink_to(controller)
