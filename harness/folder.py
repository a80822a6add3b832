"""The user's own text as a source: a file, or all readable files of a folder.

Which texts are held out depends on their content alone. Every text has a hash, and the lowest
hashes are held out until there is enough text for the scored rows:

    hash  0 ............... limit ......... sample_limit ......... 2**64
          held out, in the       trained on, in the order of the files
          order of hashes        the tokenizer learns
                                 from these

So a text is on the same side wherever it lies, copies are on the same side, and what is scored
comes from all over the folder.
"""

import gzip
import hashlib
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

import pyarrow as pa

from harness.common import UserError
from harness.documents import CHARS_PER_TOKEN
from harness.sources import Skip, Source, fault_of, held_out_bytes, parquet_texts, usable
from prepare import Settings

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst")
PIECE = 1 << 20  # characters; a longer text file is taken in pieces, cut at a line end


# ------------------------------------------------------------------ the files of a folder


@dataclass
class Files:
    """What was found: files to read, in order, and how many others there are, by kind."""

    read: list[Path] = field(default_factory=list)
    passed_over: Counter = field(default_factory=Counter)


def kind_of(path: Path) -> tuple[str, str]:
    """(suffix, suffix of the compression or ""), in lower case."""
    outer = path.suffix.lower()
    if outer in COMPRESSED:
        return Path(path.stem).suffix.lower(), outer
    return outer, ""


def find_files(path: Path) -> Files:
    """The file `path`, or the files of the folder `path` and its subfolders.

    Links to folders are followed, each folder is entered once. Hidden files and folders are
    passed over.
    """
    found = Files()
    if path.is_file():
        add_file(path, found)
    entered = {os.path.realpath(path)}

    def enter(folder: str, name: str) -> bool:
        target = os.path.realpath(os.path.join(folder, name))
        if name.startswith("."):
            found.passed_over["hidden"] += 1
        elif target in entered:
            found.passed_over["folders linked twice"] += 1
        else:
            entered.add(target)
            return True
        return False

    def unreadable(error: OSError) -> None:
        found.passed_over["unreadable folders"] += 1

    for folder, folders, names in os.walk(path, onerror=unreadable, followlinks=True):
        folders[:] = [name for name in sorted(folders) if enter(folder, name)]
        for name in names:
            add_file(Path(folder, name), found)
    found.read.sort()
    return found


def add_file(path: Path, found: Files) -> None:
    kind, _ = kind_of(path)
    if path.name.startswith("."):
        found.passed_over["hidden"] += 1
    elif not path.is_file():
        found.passed_over["broken links" if path.is_symlink() else "special files"] += 1
    elif kind in SUFFIXES:
        found.read.append(path)
    else:
        found.passed_over[path.suffix.lower()[:20] or "without a suffix"] += 1


# ------------------------------------------------------------------ the texts of a file


def json_text(line: str) -> str | Skip:
    """The field "text" of one line of a .jsonl file."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return Skip("not JSON")
    if not isinstance(record, dict):
        return Skip("JSON without fields")
    if isinstance(record.get("text"), str):
        return record["text"]
    strings = {name: value for name, value in record.items() if isinstance(value, str)}
    if not strings:
        return Skip("no field 'text'")
    longest = max(strings, key=lambda name: len(strings[name]))
    return Skip(f"no field 'text' but {longest[:40]!r}")


def pieces(lines: io.TextIOWrapper, piece: int) -> Iterator[str | Skip]:
    """A text in pieces of about that many characters; an empty file is one empty text."""
    text = lines.read(piece) + lines.readline(piece)
    while True:
        yield Skip("binary") if "\0" in text else text
        text = lines.read(piece) + lines.readline(piece)
        if not text:
            return


def open_file(path: Path, compression: str):
    """The file, unpacked as it is read."""
    if compression == ".gz":
        return gzip.open(path, "rb")
    if compression == ".zst":
        return pa.input_stream(str(path), "zstd")
    return open(path, "rb")


def file_texts(path: Path, piece: int = PIECE) -> Iterator[str | Skip | None]:
    """The texts of one file, read as its suffixes say, in bounded memory.

    Raises:
        UserError: it cannot be read or unpacked, or is a parquet file without the column "text".
    """
    kind, compression = kind_of(path)
    try:
        with open_file(path, compression) as file:
            if kind == ".parquet":
                # Parquet is read from the end: it has to be unpacked at once.
                seekable = pa.BufferReader(file.read()) if compression else file
                yield from parquet_texts(path, seekable)
                return
            lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")
            if kind == ".jsonl":
                yield from (json_text(line) for line in lines if line.strip())
            else:
                yield from pieces(lines, piece)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


# ------------------------------------------------------------------ what is held out


@dataclass
class Split:
    """Which texts are held out: those whose hash is at most `limit`.

    The tokenizer learns from those above that, up to `sample_limit`.
    """

    limit: int
    sample_limit: int
    held_out: list[str]  # in the order of their hashes


ALL_HASHES = (1 << 64) - 1


def text_hash(text: str) -> int:
    """64 bits of the text's content, white space included."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class LowestHashes:
    """Of many texts those with the lowest hashes: enough of them to hold `need` bytes."""

    def __init__(self, need: int):
        self.need = need
        self.kept: dict[int, str] = {}
        self.n_bytes = 0  # of those kept
        self.limit = ALL_HASHES  # no text above it can be among them

    def add(self, text: str, n_bytes: int) -> None:
        hashed = text_hash(text)
        if hashed > self.limit or hashed in self.kept:
            return
        self.kept[hashed] = text
        self.n_bytes += n_bytes
        if self.n_bytes > 2 * self.need:
            self.prune()

    def prune(self) -> None:
        """Keep only the lowest ones that hold `need` bytes."""
        total = 0
        kept = {}
        for hashed in sorted(self.kept):
            if total >= self.need:
                break
            kept[hashed] = self.kept[hashed]
            total += len(kept[hashed].encode())
            self.limit = hashed
        self.kept = kept
        self.n_bytes = total


def split_texts(path: Path, files: Files, settings: Settings) -> Split:
    """Read all files once and choose what is held out.

    Raises:
        UserError: there is no file to read, or too little text in them.
    """
    if not path.exists():
        raise UserError(f"no file or folder {path}. hint: choose the data again with --data")
    if not files.read:
        raise UserError(
            f"{path} is no file or folder with {', '.join(SUFFIXES)} files (or .gz, .zst of these)"
            + passed_over_text(files.passed_over)
        )
    skipped = Counter()
    lowest = LowestHashes(held_out_bytes(settings))
    total = 0
    n_texts = 0
    for text in usable(chain.from_iterable(map(file_texts, files.read)), skipped):
        n_bytes = len(text.encode())
        lowest.add(text, n_bytes)
        total += n_bytes
        n_texts += 1
    lowest.prune()
    if total < 2 * lowest.need or n_texts == len(lowest.kept):
        raise UserError(
            f"{path} has {total / 1e6:.1f} MB of text in {n_texts} texts, "
            f"profile '{settings.profile}' needs {2 * lowest.need / 1e6:.1f} MB, "
            f"{lowest.need / 1e6:.1f} MB of it held out"
            f"{passed_over_text(files.passed_over, skipped)}. "
            f"hint: {missing_text_hint(skipped)}"
        )
    # Twice what the tokenizer reads, since it takes only the beginnings of long texts.
    share = min(1.0, 2 * CHARS_PER_TOKEN * settings.vocab_size / total)
    sample_limit = lowest.limit + int(share * (ALL_HASHES - lowest.limit))
    return Split(lowest.limit, sample_limit, list(lowest.kept.values()))


def missing_text_hint(skipped: Counter) -> str:
    """What helps where there is too little text."""
    for reason, _ in skipped.most_common():
        if "' but '" in reason:
            name = reason.split("' but '")[1].rstrip("'")
            return f"rename the field '{name}' to 'text', or more text"
    return "more text, or smaller files"


def passed_over_text(files: Counter, texts: Counter | None = None) -> str:
    """What was not used, as the end of a message: "; passed over: 644 .json files"."""
    parts = []
    if files:
        parts.append("files passed over: " + counts_text(files))
    if texts:
        parts.append("texts skipped: " + counts_text(texts))
    return "".join(f"; {part}" for part in parts)


def counts_text(counts: Counter, shown: int = 6) -> str:
    """The most frequent ones, and how many others: "644 .json, 3 .png"."""
    common = counts.most_common(shown)
    parts = [f"{n} {name}" for name, n in common]
    if rest := sum(counts.values()) - sum(n for _, n in common):
        parts.append(f"{rest} others")
    return ", ".join(parts)


def folder_source(path: Path, settings: Settings) -> Source:
    """The texts of a file or of a folder's files, see the top of this module."""
    files = find_files(path)
    split = cache(lambda: split_texts(path, files, settings))

    def texts(shard: str) -> Iterable[str | Skip | None]:
        if shard == "val":
            return iter(split().held_out)
        low, high = split().limit, ALL_HASHES
        if shard == "sample":  # by hash, so that it comes from all over the folder
            high = split().sample_limit
        every = chain.from_iterable(map(file_texts, files.read))
        # What cannot be used is counted by the reader of these texts.
        return (text for text in every if fault_of(text) or low < text_hash(text) <= high)

    seen = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files.read]
    state = hashlib.sha256(json.dumps(seen).encode()).hexdigest() if seen else None
    return Source(["text"], ["sample"], "val", texts, state=state, passed_over=files.passed_over)
