"""Save databases, objects and finished artifacts to a folder, or restore them: `backup.py save|restore FOLDER`.

Nothing has to stop for `save`: the databases come first, so that what they name is there when the rest is copied. Before
`restore`, stop all that writes. Redis is left out: it holds only what is in flight.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

import s3fs

DATABASES = ("prefect", "mlflow")
RUNS = Path("runs")
UNFINISHED = ".building"


def _finished(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if UNFINISHED in Path(member.name).parts else member


def save(folder: Path) -> None:
    """Write a folder that must not exist yet; it has its name only once it is whole."""
    if folder.exists():
        raise SystemExit(f"{folder} exists: give a new name")
    part = folder.with_name(folder.name + ".part")
    part.mkdir()
    for name in DATABASES:
        subprocess.run(["pg_dump", "--format=custom", f"--file={part / name}.dump", name], check=True)
    store = s3fs.S3FileSystem()
    for bucket in store.ls(""):
        for key in store.find(bucket):
            file = part / "objects" / key
            file.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(key, file)
    with tarfile.open(part / "runs.tar", "w") as out:
        if RUNS.is_dir():
            out.add(RUNS, filter=_finished)
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
