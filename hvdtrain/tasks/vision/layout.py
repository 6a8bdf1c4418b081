"""The folders of a data folder: which has the class folders for training, which those for testing."""

import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from hvdtrain.loop.feed.split_names import (
    ambiguous,
    choose_splits,
    is_junk,
    is_read_elsewhere,
    note_unused,
    quoted,
    split_name,
    splits_among,
)
from hvdtrain.settings.safety.exits import BadInput

# Endings of formats that Pillow reads, and that cameras, browsers or data sets write.
IMAGE_ENDINGS = (
    *IMG_EXTENSIONS,
    *(".jfif", ".jpe", ".gif", ".apng", ".avif", ".jp2", ".j2k", ".jpx", ".pbm", ".pnm", ".pfm", ".dib", ".tga"),
)


@dataclass(kw_only=True)
class FolderLayout:
    """Two folders of class folders, and the numbers of files that are not used, by reason."""

    train: Path
    test: Path | None = None  # None if a fifth of the images for training is for the test
    unused: Counter[str] = field(default_factory=Counter)


def is_image(name: str) -> bool:
    """Whether this is the name of a file of pixels."""
    return name.lower().endswith(IMAGE_ENDINGS) and not name.startswith(".")


def find_layout(folder: Path) -> FolderLayout:
    """Find FOLDER/TRAIN/CLASS/* and FOLDER/TEST/CLASS/*, or FOLDER/CLASS/*, also some folders further down.

    Raises OSError if a folder cannot be read, and BadInput if names have two readings.
    """
    unused = Counter[str]()
    root = _descend(folder, unused, is_split=False)
    folders = _folders_in(root)
    splits = splits_among(folders, lambda name: not _has_images(root / name))
    if not splits:
        _require_classes(root, folder)
        _note_rest(root, class_folders(root), unused)
        return FolderLayout(train=root, unused=unused)
    others = sorted(set(folders) - set(splits))
    [train], found = choose_splits(splits, others, folder, "class folder")
    tests = [name for [name] in found]
    part = _descend(root / train, unused)
    _require_split(part, [name for name in others if _has_images(root / name)], folder, bool(tests))
    layout = FolderLayout(train=part, unused=unused)
    classes = class_folders(part)
    _note_rest(part, classes, unused)
    for test in tests:
        notes = Counter[str]()
        part = _descend(root / test, notes)
        labels = class_folders(part)
        reason = ""
        if layout.test is not None:
            reason = ", since one split is enough"
        elif len(labels) < 2 and set(classes).isdisjoint(labels):  # one folder may only hold the images together
            reason = ", which has no folders of the classes"
        if reason:
            note_unused(root, [test], notes := Counter())
            unused[f"in {test}/{reason}"] += notes.total()
        else:
            layout.test = part
            _note_rest(part, labels, notes)
            unused.update(notes)
    _note_rest(root, {train, *tests}, unused)
    return layout


def class_folders(part: Path) -> list[str]:
    """Return the names of the classes, without links to folders in `part`: their images would have two labels."""
    return _folders_in(part, part)


def walk(top: Path, part: Path, unused: Counter[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder of a class with the names of its images, both in order; count the files that are left out."""
    found = []
    for subfolder, folders, files in os.walk(top, followlinks=True, onerror=_raise):
        path = Path(subfolder)
        images = sorted(filter(is_image, files))
        left_out = [name for name in folders if is_junk(name) or is_read_elsewhere(path / name, part)]
        note_unused(path, {*left_out, *files}.difference(images), unused, part)
        folders[:] = set(folders) - set(left_out)
        found.append((subfolder, images))
    yield from sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _require_classes(root: Path, folder: Path) -> None:
    """Raise BadInput if several folders share folders, such as the classes of splits that have other names."""
    classes = class_folders(root)
    inner = [found for name in classes if (found := set(_folders_in(root / name)))]
    shared = set.intersection(*inner) if len(inner) > 1 else set[str]()
    if len(shared) > 1:
        raise ambiguous(
            folder,
            f"{quoted(classes)} as splits with the classes {quoted(sorted(shared))}",
            f"{quoted(classes)} as classes with folders in them",
            "Call the splits train and test, or pass one of them; or move the images of each class into one folder",
        )


def _require_split(part: Path, classes: list[str], folder: Path, has_test: bool) -> None:
    """Raise BadInput if the folder for training has no class folders, or may be one of `classes` itself."""
    is_split = bool(class_folders(part))
    if classes and not (is_split and has_test):
        raise ambiguous(
            folder,
            f"{part.name!r} for training, and nothing of {quoted(classes)}",
            f"{part.name!r} as a class folder like {quoted(classes)}",
            f"Rename the class to class_{part.name}, or move away what is not to be used",
        )
    if not is_split:
        raise BadInput(f"--data-dir {folder}: {part} has no class folders. Sort its images into {part}/CLASS/.")


def _folders_in(folder: Path, part: Path | None = None) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not is_junk(entry.name) and _is_folder(entry)]
    return sorted(name for name in names if not is_read_elsewhere(folder / name, part))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _descend(folder: Path, unused: Counter[str], *, is_split: bool = True) -> Path:
    """Return the folder, or the single folder in it if that one has folders and no images."""
    match _folders_in(folder):
        case [name] if is_split or split_name(name) is None:
            inner = folder / name
            if _folders_in(inner) and not _has_images(inner):
                _note_rest(folder, {name}, unused)
                return _descend(inner, unused, is_split=is_split)
    return folder


def _has_images(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(is_image(entry.name) for entry in entries)


def _note_rest(folder: Path, used: Collection[str], unused: Counter[str]) -> None:
    names = {path.name for path in folder.iterdir()} - set(used)
    if images := sorted(name for name in names if is_image(name) and not (folder / name).is_dir()):
        unused["in no class folder"] += len(images)
    note_unused(folder, names.difference(images), unused, folder)
