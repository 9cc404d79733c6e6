"""Claims to a run folder, as files: the process with the highest-numbered claim may write into the folder.

``owner/`` contains ``claim_00000001.json``, ``claim_00000002.json``, …. A claim is valid until it is released; the next
owner creates the next number. A claim is written to a temporary file and then linked to its name, which fails if the
name exists, so exactly one of the processes that compete for a number succeeds. Link and exclusive creation are atomic
on network file systems too, where locks (``fcntl``, ``flock``) may be local.

The highest claim is never removed, so numbers are not reused. A process that was stopped between reading the claims and
creating its own cannot take the folder from a later owner: either its number is already in use, or it finds a higher
number and withdraws.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megastack.observe.files import cannot_write, replace_text
from megastack.observe.process import Process
from megastack.records import RecordError, integer, mapping, parse_record, string

FOLDER = "owner"
_CLAIM = re.compile(r"claim_([0-9]{8,})\.json")
_PART = ".part_"
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)
_STALE_S = 0.05


@dataclass(frozen=True)
class Job:
    """The job that a process belongs to; restarts belong to the same job.

    Attributes:
        group: identifies an elastic agent or rendezvous; each start in it replaces the previous one.
        batch: the job id of the batch system.
        requeues: how often the batch system requeued the job.
    """

    group: str | None = None
    batch: str | None = None
    requeues: int = 0

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Job:
        """Inverse of ``asdict``.

        Raises:
            RecordError: the record is not a valid job.
        """
        group, batch = (None if record.get(name) is None else string(record, name) for name in ("group", "batch"))
        return cls(group, batch, integer(record, "requeues"))

    def supersedes(self, earlier: Job) -> bool:
        """Whether a start of this job replaces an earlier start, even if the earlier process may still be running."""
        if self.group is not None and self.group == earlier.group:
            return True
        return self.batch is not None and self.batch == earlier.batch and self.requeues > earlier.requeues


NO_JOB = Job()


@dataclass(frozen=True)
class Claim:
    """A claim to a folder, as read from its file; the default means that there is no claim.

    Attributes:
        number: its position in the sequence.
        mark: changes whenever the file is touched.
        token: unique to this owner.
        owner: the owning process; ``None`` if the claim cannot be read.
        job: the job of the process.
        released: whether the owner released the folder.
    """

    number: int = 0
    mark: tuple[int, ...] = ()
    token: str = ""
    owner: Process | None = None
    job: Job = NO_JOB
    released: bool = True

    def __str__(self) -> str:
        return str(self.owner or f"the unknown process of {claim_path(Path(), self.number)}")


def claim_path(folder: Path, number: int) -> Path:
    """Return the path of a claim to a run folder."""
    return folder / FOLDER / f"claim_{number:08d}.json"


def highest(folder: Path) -> int:
    """Return the number of the highest claim; 0 if there is none."""
    try:
        names = os.listdir(folder / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return max((int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))), default=0)


def newest_claim(folder: Path) -> Claim:
    """Read the highest claim."""
    while number := highest(folder):
        try:
            return read_claim(folder, number)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            time.sleep(_STALE_S)  # the directory listing was stale: a later claim has replaced this one
    return Claim()


def read_claim(folder: Path, number: int) -> Claim:
    """Read a claim; the file is opened, since a network file system may serve a plain ``stat`` from a cache.

    Raises:
        OSError: the claim does not exist or cannot be read.
    """
    with open(claim_path(folder, number), "rb") as file:
        stat, text = os.fstat(file.fileno()), file.read()
    mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    try:
        record = parse_record(text)
        owner, job = Process.from_record(mapping(record, "owner")), Job.from_record(mapping(record, "job"))
        return Claim(number, mark, string(record, "token"), owner, job, "released" in record)
    except RecordError:
        return Claim(number, mark, released=False)


def create_claim(folder: Path, number: int, job: Job) -> str | None:
    """Create a claim for this process.

    Returns:
        The token of the claim, or ``None`` if another process has that number or a higher one.

    Raises:
        OSError: the claim cannot be written; no file remains.
    """
    claims, token = folder / FOLDER, uuid.uuid4().hex
    made = not claims.exists()
    record = {"token": token, "owner": asdict(Process.current()), "job": asdict(job), "claimed": time.time()}
    try:
        claims.mkdir(exist_ok=True)
        created = _create(folder, number, json.dumps(record) + "\n", token)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                claims.rmdir()
        raise cannot_write(claim_path(folder, number), error) from error
    if created and highest(folder) > number:
        claim_path(folder, number).unlink(missing_ok=True)  # the later owner has already removed this number
        return None
    if created:
        _remove_stale(claims, number)
    return token if created else None


def release_claim(folder: Path, number: int, token: str) -> None:
    """Mark a claim as released, unless another process owns it by now.

    Raises:
        OSError: the claim cannot be read or written.
    """
    path = claim_path(folder, number)
    with contextlib.suppress(RecordError):
        record = parse_record(path.read_bytes())
        if record.get("token") == token:
            replace_text(path, json.dumps(record | {"released": time.time()}) + "\n")


def _create(folder: Path, number: int, text: str, token: str) -> bool:
    """Create the file with its content unless it exists; without link support, in two steps."""
    target, part = claim_path(folder, number), folder / FOLDER / f"{_PART}{token}"
    try:
        part.write_text(text, encoding="utf-8")
        try:
            os.link(part, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_new(target, text)
        return True
    except FileExistsError:  # perhaps by this process: the reply to a successful link can be lost on the network
        with contextlib.suppress(FileNotFoundError):
            return read_claim(folder, number).token == token
        return False
    except FileNotFoundError:
        return False  # another process has removed the temporary file
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _write_new(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def _remove_stale(claims: Path, number: int) -> None:
    """Remove earlier claims, and temporary files of processes that were killed while claiming."""
    for name in os.listdir(claims):
        match = _CLAIM.fullmatch(name)
        if name.startswith(_PART) or (match and int(match[1]) < number):
            with contextlib.suppress(OSError):
                (claims / name).unlink()
