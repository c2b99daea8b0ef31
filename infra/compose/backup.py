"""Save databases, objects and finished artifacts to a folder, or restore them: `backup.py save|restore FOLDER`.

Nothing has to stop for `save`: the databases come first, so that what they name is there when the rest is copied, and
what a run deletes meanwhile is left out. Before `restore`, stop all that writes. Redis is left out: it holds only what is
in flight.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import s3fs

DATABASES = ("prefect", "mlflow")
RUNS = Path("runs")
UNFINISHED = ".building"


def _save_runs(out: tarfile.TarFile) -> None:
    for parent, folders, names in os.walk(RUNS):
        folders[:] = [name for name in folders if name != UNFINISHED]
        for name in (*folders, *names):
            with suppress(FileNotFoundError):  # records are written every few seconds, by a rename of a temporary file
                out.add(Path(parent, name), recursive=False)


def save(folder: Path) -> None:
    """Write a folder that must not exist yet; it has its name only once it is whole."""
    if folder.exists():
        raise SystemExit(f"{folder} exists: give a new name")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # of a save that did not end
    part.mkdir()
    for name in DATABASES:
        subprocess.run(["pg_dump", "--format=custom", f"--file={part / name}.dump", name], check=True)
    store = s3fs.S3FileSystem()
    for bucket in store.ls(""):
        for key in store.find(bucket):
            file = part / "objects" / key
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                store.get_file(key, file)
            except FileNotFoundError:  # unfinished work, which a stage deletes at its end
                file.unlink(missing_ok=True)
    with tarfile.open(part / "runs.tar", "w") as out:
        _save_runs(out)
    part.rename(folder)


def restore(folder: Path) -> None:
    """Replace both databases, and put back objects and artifacts; those that are not in the folder stay."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is no backup: there is no such folder")
    for name in DATABASES:
        command = ["pg_restore", "--clean", "--if-exists", "--no-owner", "--exit-on-error", "--single-transaction"]
        subprocess.run([*command, f"--dbname={name}", folder / f"{name}.dump"], check=True)
    store, objects = s3fs.S3FileSystem(), folder / "objects"
    for file in sorted(each for each in objects.rglob("*") if each.is_file()):
        key = file.relative_to(objects).as_posix()
        store.makedirs(key.partition("/")[0], exist_ok=True)
        store.put_file(file, key)
    with tarfile.open(folder / "runs.tar") as saved:
        saved.extractall(filter="data")


if __name__ == "__main__":
    {"save": save, "restore": restore}[sys.argv[1]](Path(sys.argv[2]))
