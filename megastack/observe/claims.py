"""Claims to a run folder, as files: who may write into it is whoever made the claim with the highest number.

``owner/`` holds ``claim_00000001.json``, ``claim_00000002.json``, …. A claim is held until it says that it was
released; the next owner creates the next number. A claim is written beside and then linked to its name, which fails
where the name exists: of any number of processes that want the next number, one gets it, and the others find it there.
Link and exclusive creation are atomic on network file systems too, where locks (``fcntl``, ``flock``) may be local.

The highest claim is never removed, so numbers are not used again: a process that was stopped between looking and
claiming cannot take a folder from a later owner. Either its number is taken, or it finds a higher one and withdraws.
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
from typing import Any

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
    """What starts of one job have in common.

    Attributes:
        group: equal for all starts by one elastic agent or rendezvous, each of which replaces the one before.
        batch: the batch system's job.
        requeues: how often that was put back into the queue.
    """

    group: str | None = None
    batch: str | None = None
    requeues: int = 0

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Job:
        """The inverse of ``asdict``.

        Raises:
            RecordError: it is not such a record.
        """
        group, batch = (None if record.get(name) is None else string(record, name) for name in ("group", "batch"))
        return cls(group, batch, integer(record, "requeues"))

    def supersedes(self, earlier: Job) -> bool:
        """Whether a start of this job replaces that one, even where its process cannot be known to be gone."""
        if self.group is not None and self.group == earlier.group:
            return True
        return self.batch is not None and self.batch == earlier.batch and self.requeues > earlier.requeues


NO_JOB = Job()


@dataclass(frozen=True)
class Claim:
    """The highest claim to a folder, as it was found; number 0 and released where there is none.

    Attributes:
        number: its place in the sequence.
        mark: differs once the file has been touched.
        token: unique to this owner.
        owner: the process; ``None`` where the claim cannot be read.
        job: what the process is a start of.
        released: whether the folder was given back.
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
    """The file of a claim to a run folder."""
    return folder / FOLDER / f"claim_{number:08d}.json"


def highest(folder: Path) -> int:
    """The number of the claim that counts; 0 where there is none."""
    try:
        names = os.listdir(folder / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return max((int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))), default=0)


def newest_claim(folder: Path) -> Claim:
    """The claim that counts."""
    while number := highest(folder):
        try:
            return read_claim(folder, number)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            time.sleep(_STALE_S)  # a later one has taken its place, and the listing was an old one
    return Claim()


def read_claim(folder: Path, number: int) -> Claim:
    """One claim; opened to be looked at, since a network file system may answer a mere ``stat`` from a cache.

    Raises:
        OSError: it is not there, or cannot be read.
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
    """Create a claim of this process; its token, or ``None`` where somebody has that number or a later one.

    Raises:
        OSError: it cannot be written; nothing is left behind.
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
        claim_path(folder, number).unlink(missing_ok=True)  # the owner of the later one has removed this number before
        return None
    if created:
        _tidy(claims, number)
    return token if created else None


def release_claim(folder: Path, number: int, token: str) -> None:
    """Note that a claim is released, unless it has become somebody else's.

    Raises:
        OSError: it cannot be read or written.
    """
    path = claim_path(folder, number)
    with contextlib.suppress(RecordError):
        record = parse_record(path.read_bytes())
        if record.get("token") == token:
            replace_text(path, json.dumps(record | {"released": time.time()}) + "\n")


def _create(folder: Path, number: int, text: str, token: str) -> bool:
    """Create the file with its content, or find it there; without links on the file system the content comes second."""
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
    except FileExistsError:  # perhaps this one's: the answer to a link that succeeded can get lost on the network
        with contextlib.suppress(FileNotFoundError):
            return read_claim(folder, number).token == token
        return False
    except FileNotFoundError:
        return False  # a faster process has tidied up
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


def _tidy(claims: Path, number: int) -> None:
    """Remove earlier claims, and what processes left that were killed while they claimed."""
    for name in os.listdir(claims):
        match = _CLAIM.fullmatch(name)
        if name.startswith(_PART) or (match and int(match[1]) < number):
            with contextlib.suppress(OSError):
                (claims / name).unlink()
