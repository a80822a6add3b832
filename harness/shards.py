"""The prepared cache: tokenizer, held-out rows, token shards, and the manifest that lists them.

    tokenizer.json       see prepare.Tokenizer
    val_rows.bin         uint16 [n, seq_len + 1]: what is scored, packed rows of held-out documents
    holdout_rows.bin     the same, a quarter as many rows, of other documents: no decision sees them
    preview_rows.bin     the same, a sixteenth: for the curve of a long run
    held_out_hashes.bin  uint64 [n]: text_hash of all held-out documents
    train_SHARD.bin      uint16: documents one after another, each with BOS first
    manifest.json        sizes and SHA-256 of these, settings, counts; its data_id is written last

Every file is written atomically and noted in the manifest when it is complete, so a preparation
that was killed goes on from there.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

import prepare
from harness.common import UserError, atomic_file, file_hash, write_atomic
from harness.documents import (
    DocumentEncoder,
    EncodedText,
    encode_all,
    learnable,
    save_tokenizer,
    train_tokenizer,
)
from harness.hub import locked
from harness.overlap import BATCH_TOKENS, Dropped, HeldOut
from harness.sources import Source, usable
from prepare import Settings, Tokenizer

DATA_VERSION = 2  # raise it whenever the same text could give another cache
SHARD_TOKENS = 100_000_000  # a longer shard continues in another file: a reader maps one at once
BUFFER = 1000  # documents that packing chooses from, see prepare.pack_rows
ROW_SETS = {"val_rows.bin": 1, "holdout_rows.bin": 4, "preview_rows.bin": 16}  # 1/n of eval_tokens
HELD_OUT_FILES = (*ROW_SETS, "held_out_hashes.bin")


def cache_settings(settings: Settings) -> dict:
    """What a cache depends on. The same text at another place is the same data."""
    return {
        "eval_version": prepare.EVAL_VERSION,
        "data_version": DATA_VERSION,
        "vocab_size": settings.vocab_size,
        "seq_len": settings.seq_len,
        "eval_tokens": settings.eval_tokens,
        "data": "path" if settings.data_path else settings.data,
    }


def prepare_data(
    settings: Settings, source: Source, allow_missing: bool = False, verify: bool = False
) -> dict:
    """Bring the cache to completeness; what is there and right is left alone.

    allow_missing: go on without training shards that the hub lacks.
    verify: compare the content of every file, not only its size.

    Returns the manifest; its key "made" (not in the file) says whether anything was made.

    Raises:
        UserError: the text, the hub or the settings do not allow it.
    """
    settings.cache.mkdir(parents=True, exist_ok=True)
    preparation = Preparation(settings, source)
    if not verify and preparation.is_complete():
        return preparation.manifest | {"made": False}
    lock = settings.root / f"{settings.data}.lock"  # the raw files are shared between profiles
    with locked(lock, f"preparing {settings.data}"):
        preparation = Preparation(settings, source, verify)  # another process may have done it
        for name in preparation.damaged:
            path = settings.cache / name
            print(f"{path} is missing or damaged: making it again", file=sys.stderr)
        preparation.complete(allow_missing)
    return preparation.manifest | {"made": True}


class Preparation:
    """One cache on its way to completeness."""

    def __init__(self, settings: Settings, source: Source, verify: bool = False):
        self.settings = settings
        self.source = source
        self.verify = verify
        self.cache = settings.cache
        self.row_len = settings.seq_len + 1
        self.manifest = self.read_manifest()
        self.damaged = [name for name in self.manifest["files"] if not self.is_right(name)]
        self.forget(self.damaged)
        if verify:
            self.manifest["missing"] = []  # ask the hub again

    # what is there

    def read_manifest(self) -> dict:
        """The manifest of this cache, or an empty one if it belongs to other settings or texts."""
        manifest = prepare.read_manifest(self.cache)
        same_text = self.source.state in (None, manifest.get("state"))
        if manifest.get("settings") == cache_settings(self.settings) and same_text:
            return manifest
        return {
            "settings": cache_settings(self.settings),
            "state": self.source.state,
            "passed_over": self.source.passed_over,
            "files": {},
            "train": [],
            "stats": {},
            "missing": [],
        }

    def is_right(self, name: str) -> bool:
        """Whether a file has the size noted for it, and with `verify` the content."""
        path = self.cache / name
        size, digest = self.manifest["files"][name]
        if not path.exists() or path.stat().st_size != size:
            return False
        return not self.verify or file_hash(path) == digest

    def forget(self, names: list[str]) -> None:
        """Take files out of the manifest, and what follows from them."""
        if not names:
            return
        files = self.manifest["files"]
        gone = files if "tokenizer.json" in names else names  # all else follows from the tokenizer
        files = {name: entry for name, entry in files.items() if name not in gone}
        stats = self.manifest["stats"]
        self.manifest["stats"] = {s: n for s, n in stats.items() if set(n["files"]) <= set(files)}
        self.manifest["files"] = files
        self.manifest.pop("data_id", None)

    def lacking(self) -> list[str]:
        """Training shards that are wanted, not there, and not known to be missing."""
        known = {*self.manifest["stats"], *self.manifest["missing"]}
        return [shard for shard in self.source.train if shard not in known]

    def is_complete(self) -> bool:
        return "data_id" in self.manifest and not self.lacking()

    # what is made

    def complete(self, allow_missing: bool) -> None:
        """Make what is lacking: tokenizer, held-out rows, training shards."""
        files = self.manifest["files"]
        needs_tokenizer = "tokenizer.json" not in files
        needs_rows = not set(HELD_OUT_FILES) <= set(files)
        raw = self.lacking()
        if needs_tokenizer:
            raw += self.source.sample
        if needs_rows:
            raw += [self.source.val]
        self.download(raw, allow_missing)
        if needs_tokenizer:
            self.make_tokenizer()
        tokenizer = Tokenizer.load(self.cache / "tokenizer.json")
        max_len = self.settings.seq_len if self.source.cut else None
        encoder = DocumentEncoder(tokenizer, max_len)
        if needs_rows:
            self.make_rows(encoder)
        self.make_shards(encoder)
        self.manifest["cropped"] = self.cropped_share(tokenizer.get_bos_token_id())
        self.manifest["data_id"] = prepare.data_id(self.manifest)
        self.record()

    def record(self, *names: str) -> None:
        """Note files that are complete, and write the manifest."""
        manifest = self.manifest
        for name in names:
            path = self.cache / name
            manifest["files"][name] = [path.stat().st_size, file_hash(path)]
        shards = sorted(manifest["stats"])
        manifest["train"] = [name for shard in shards for name in manifest["stats"][shard]["files"]]
        total = Counter()
        for stats in manifest["stats"].values():
            total.update({kind: n for kind, n in stats.items() if isinstance(n, int)})
        manifest["total"] = {"documents": 0, "tokens": 0} | total
        content = json.dumps(manifest, indent=1, sort_keys=True)
        write_atomic(self.cache / "manifest.json", content.encode())

    def download(self, shards: list[str], allow_missing: bool) -> None:
        missing = self.source.fetch(list(dict.fromkeys(shards)), self.verify)
        if not missing:
            return
        if not allow_missing or self.source.val in missing:
            raise UserError(
                f"the hub lacks {', '.join(missing)}. "
                "hint: --allow-missing goes on without training shards"
            )
        self.manifest["missing"] = sorted({*self.manifest["missing"], *missing})

    def make_tokenizer(self) -> None:
        present = [shard for shard in self.source.sample if shard not in self.manifest["missing"]]
        texts = usable(chain.from_iterable(map(self.source.texts, present)), Counter())
        vocab_size = self.settings.vocab_size
        sample = learnable(progress(texts, "tokenizer"), vocab_size)
        tokenizer = train_tokenizer(sample, vocab_size)
        if (size := tokenizer.get_vocab_size()) < vocab_size:
            raise UserError(
                f"the text is too uniform: it gives a vocabulary of {size} tokens, "
                f"not {vocab_size}. hint: more text, of more kinds"
            )
        save_tokenizer(tokenizer, self.cache / "tokenizer.json")
        self.record("tokenizer.json")

    def make_rows(self, encoder: DocumentEncoder) -> None:
        """The sets of held-out rows. Each text goes to one set; the hashes of all are kept."""
        text_hashes = []

        def hashed(texts: Iterable[EncodedText]) -> Iterator[EncodedText]:
            for text in texts:
                text_hashes.extend(text.hashes)
                yield text

        held_out = usable(self.source.texts(self.source.val), Counter())
        texts = hashed(encode_all(encoder, progress(held_out, "held-out text")))
        for name, part in ROW_SETS.items():
            n_rows = max(1, self.settings.eval_tokens // self.settings.seq_len // part)
            documents = new_documents(texts, set(text_hashes))  # no copies of the sets before
            packed = prepare.pack_rows(documents, self.row_len, min(BUFFER, n_rows))
            rows = prepare.stack_rows(packed, n_rows, self.row_len)
            if len(rows) < n_rows:
                raise UserError(
                    f"the held-out text fills {len(rows)} rows of {name}, each of "
                    f"{self.settings.seq_len} tokens, not {n_rows}. hint: more text"
                )
            write_atomic(self.cache / name, rows.tobytes())
        for _ in texts:  # the hashes of the rest
            pass
        hashes = np.array(text_hashes, np.uint64)
        write_atomic(self.cache / "held_out_hashes.bin", hashes.tobytes())
        self.record(*HELD_OUT_FILES)

    def make_shards(self, encoder: DocumentEncoder) -> None:
        shards = self.lacking()
        if shards:
            held_out = self.held_out(encoder.bos)
        for shard in shards:
            skipped = Counter()
            texts = progress(usable(self.source.texts(shard), skipped), shard)
            stats = write_shard(self.cache, shard, encode_all(encoder, texts), held_out)
            self.manifest["stats"][shard] = stats | {"skipped": skipped}
            self.record(*stats["files"])
        if not self.manifest["train"]:
            raise UserError(f"no training text is left in {self.settings.data}")

    def held_out(self, bos: int) -> HeldOut:
        text_hashes = np.fromfile(self.cache / "held_out_hashes.bin", np.uint64)
        rows = {
            name: np.fromfile(self.cache / name, np.uint16).reshape(-1, self.row_len)
            for name in ROW_SETS
        }
        return HeldOut(text_hashes, rows, bos)

    def cropped_share(self, bos: int) -> float:
        """Share of the tokens that packing crops away, over the first 100,000 documents."""

        def documents() -> Iterator[memoryview]:
            return islice(training_documents(self.settings, self.manifest, bos), 100_000)

        n_tokens = sum(map(len, documents()))
        n_rows = sum(1 for _ in prepare.pack_rows(documents(), self.row_len, BUFFER))
        return 1 - n_rows * self.row_len / n_tokens


def write_shard(
    cache: Path,
    shard: str,
    texts: Iterable[EncodedText],
    held_out: HeldOut,
    shard_tokens: int = SHARD_TOKENS,
    batch_tokens: int = BATCH_TOKENS,
) -> dict:
    """Write the documents that are not held out to flat uint16 files of about shard_tokens.

    Returns the names of the files, and what was counted.
    """
    base = shard.replace("/", "-").removesuffix(".parquet")
    files = []
    total = Counter(documents=0, tokens=0)
    dropped = Dropped()
    batches = batches_of(texts, batch_tokens)
    size = shard_tokens
    while size >= shard_tokens:
        name = f"train_{base}{f'.{len(files)}' if files else ''}.bin"
        size = 0
        with atomic_file(cache / name) as file:
            for batch in batches:
                tokens, n_documents = held_out.filter(batch, dropped)
                file.write(tokens)
                size += len(tokens)
                total["documents"] += n_documents
                if size >= shard_tokens:
                    break
        if size:  # an empty file could not be mapped
            files.append(name)
            total["tokens"] += size
        else:
            (cache / name).unlink()
    shares = held_out.shares()
    return {"files": files, "shares": shares, **total, **asdict(dropped)}


def new_documents(texts: Iterable[EncodedText], known: set[int]) -> Iterator[memoryview]:
    """The documents of the texts whose hash is not known."""
    for text in texts:
        for document, text_hash in zip(text.documents(), text.hashes, strict=True):
            if text_hash not in known:
                yield memoryview(document)


def batches_of(texts: Iterable[EncodedText], batch_tokens: int) -> Iterator[list[EncodedText]]:
    """Several texts at a time, of about batch_tokens tokens in all."""
    batch = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.tokens)
        if size >= batch_tokens:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def training_documents(settings: Settings, manifest: dict, bos: int) -> Iterator[memoryview]:
    """The documents of all training shards, those of a shard in random order."""
    for name in manifest["train"]:
        shard = np.memmap(settings.cache / name, np.uint16, mode="r")
        yield from prepare.documents_of(shard, bos, np.random.default_rng(settings.seed))


def progress(texts: Iterable[str], name: str) -> Iterator[str]:
    """The texts; a bar counts their characters when someone watches."""
    with tqdm(desc=name, unit=" characters", unit_scale=True, disable=None) as bar:
        for text in texts:
            yield text
            bar.update(len(text))
