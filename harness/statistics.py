"""What `python prepare.py` prints: a report of what was prepared, and --stats before training."""

import math
import random
from collections import Counter
from itertools import islice

import numpy as np

from harness.folder import counts_text
from harness.overlap import WINDOW
from harness.shards import ROW_SETS, training_documents
from prepare import Settings, Tokenizer, load_manifest, pack_rows

ROW_NAMES = {
    "val_rows.bin": "validation",
    "holdout_rows.bin": "held-out",
    "preview_rows.bin": "preview",
}


def report(settings: Settings, manifest: dict) -> None:
    """Print what was prepared, in a few lines."""
    tokenizer = Tokenizer.load(settings.cache / "tokenizer.json")
    total = manifest["total"]
    print(f"cache       {settings.cache}")
    print(f"tokenizer   {len(tokenizer.token_bytes)} tokens")
    print(f"training    {total['tokens'] / 1e6:.1f} M tokens in {total['documents']} documents")
    print(f"copies      {total['copies']} documents dropped whose text is held out")
    report_half_copies(manifest)
    skipped = Counter()
    for stats in manifest["stats"].values():
        skipped.update(stats["skipped"])
    if skipped:
        print(f"skipped     texts: {counts_text(skipped)}")
    if manifest["passed_over"]:
        print(f"passed over files: {counts_text(Counter(manifest['passed_over']))}")
    if manifest["missing"]:
        print(f"missing     {', '.join(manifest['missing'])}")
    print(f"packing     {100 * manifest['cropped']:.1f}% of the tokens are cropped")
    for name in ROW_SETS:
        rows = np.fromfile(settings.cache / name, np.uint16).reshape(-1, settings.seq_len + 1)
        n_bytes = int(tokenizer.token_bytes[rows[:, 1:]].sum())
        print(
            f"{ROW_NAMES[name]:<12}{len(rows)} rows of {settings.seq_len} tokens, {n_bytes} bytes, "
            f"{n_bytes / rows[:, 1:].size:.3f} per token"
        )


def report_half_copies(manifest: dict) -> None:
    """How much of the held-out rows training shared word for word, before such documents went."""
    total = manifest["total"]
    everything = total["tokens"] + total["half_copy_tokens"]
    dropped = total["half_copy_tokens"] / max(1, everything)
    shares = [stats["shares"] for stats in manifest["stats"].values()]
    upper = "at most " if len(shares) > 1 else ""  # shards may share the same tokens
    before = [
        f"{upper}{100 * min(1, sum(share[name] for share in shares)):.2f}% of {ROW_NAMES[name]}"
        for name in ("val_rows.bin", "holdout_rows.bin")
    ]
    print(
        f"half-copies {total['half_copies']} documents dropped ({100 * dropped:.2f}% of tokens) "
        f"that share {WINDOW} tokens in a row with held-out rows: {' and '.join(before)} tokens "
        "before, 0% now"
    )


def show_stats(settings: Settings) -> None:
    """Print sizes, lengths, rows as the model sees them, and the most common tokens."""
    manifest = load_manifest(settings.cache)
    tokenizer = Tokenizer.from_directory(settings.cache)
    bos = tokenizer.get_bos_token_id()
    total = manifest["total"]
    counts, lengths = count_tokens(settings, manifest, tokenizer)
    n_bytes = int((counts * tokenizer.token_bytes).sum())
    per_token = n_bytes / max(1, total["tokens"] - total["documents"])
    print(f"documents        {total['documents']}")
    print(f"bytes            {n_bytes}")
    print(f"tokens           {total['tokens']}")
    print(f"bytes per token  {per_token:.3f} (without BOS)")
    print(f"cropped          {100 * manifest['cropped']:.1f}% of the tokens, by packing")
    print("\ndocuments by length in tokens")
    most = max(lengths.values())
    for power, n in sorted(lengths.items()):
        bar = "#" * math.ceil(60 * n / most)
        print(f"{2**power:>8} - {2 ** (power + 1) - 1:<8}{n:>10}  {bar}")
    documents = training_documents(settings, manifest, bos)
    rows = list(islice(pack_rows(documents, settings.seq_len + 1, 1000), 1000))
    for row in random.Random(settings.seed).sample(rows, min(5, len(rows))):
        text = tokenizer.decode([token for document in row for token in document])
        print(f"\n--- a packed row of {len(row)} documents\n{text}")
    print("\nmost common tokens")
    for token in np.argsort(-counts)[:20].tolist():
        print(f"{counts[token]:>12}  {tokenizer.enc.decode_single_token_bytes(token)!r}")


def count_tokens(
    settings: Settings, manifest: dict, tokenizer: Tokenizer
) -> tuple[np.ndarray, Counter]:
    """(how often each token occurs, documents by floor(log2(length)))."""
    n_tokens = tokenizer.get_vocab_size()
    bos = tokenizer.get_bos_token_id()
    counts = np.zeros(n_tokens, np.int64)
    lengths = Counter()
    for name in manifest["train"]:
        shard = np.memmap(settings.cache / name, np.uint16, mode="r")
        counts += np.bincount(shard, minlength=n_tokens)
        sizes = np.diff(np.flatnonzero(shard == bos), append=len(shard))
        powers = np.bincount(np.log2(sizes).astype(int))
        lengths.update({power: n for power, n in enumerate(powers.tolist()) if n})
    return counts, lengths
