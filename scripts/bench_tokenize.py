"""Speed of making token files, compared with the bare tokenizer, and of reading them, compared with training.

    python scripts/bench_tokenize.py [--megabytes 24] [--workers 2] [--tokenizer tokenizer.json] [--json FILE]

The text is the built-in one, shuffled by document and repeated; without --tokenizer a byte-level BPE of 8,000 ids is
trained on it first. The bare tokenizer is the batch encoder of the `tokenizers` package on the same documents in
memory, in the same number of single-threaded processes; `megastack tokenize` also reads, parses, ends documents, writes
and joins. Both times include the start of the processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from megastack.assemble.training import build_training
from megastack.config.compose import compose
from megastack.corpus.tokenize import make_token_file
from megastack.corpus.worker import start_worker
from megastack.data.dataset import build_dataset
from megastack.data.loader import Loader
from megastack.data.sources import read_documents
from megastack.mesh.mesh import Mesh

BATCH = 1024


def encode(tokenizer: str, texts: list[str]) -> int:
    """The number of tokens of some texts, with the bare encoder."""
    import tokenizers

    loaded = tokenizers.Tokenizer.from_file(tokenizer)
    batches = (texts[at : at + BATCH] for at in range(0, len(texts), BATCH))
    return sum(len(each) for batch in batches for each in loaded.encode_batch_fast(batch, add_special_tokens=False))


def bare(tokenizer: str, texts: list[str], workers: int) -> tuple[float, int]:
    """The seconds and the number of tokens of the bare encoder."""
    began = time.perf_counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker) as pool:
        tokens = sum(pool.map(encode, [tokenizer] * workers, [texts[at::workers] for at in range(workers)]))
    return time.perf_counter() - began, tokens


def trained(folder: Path, texts: list[str]) -> str:
    """Train a byte-level BPE of 8,000 ids; the path of its file."""
    import tokenizers

    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def loader_rate(prefix: Path, vocab: int, length: int) -> float:
    """Tokens per second of the loader, including its checks and tensors."""
    data = build_dataset(source="bin", paths=[prefix], sequence_length=length, vocab=vocab)
    loader = Loader(data.train.samples, global_size=32, micro_size=4, vocab=vocab)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < 2:
        loader.step(steps)
        steps += 1
    return steps * 32 * length / (time.perf_counter() - began)


def training_rate(steps: int = 4) -> float:
    """Tokens per second of training the small Llama on one rank of this machine."""
    config = compose(["experiment=laptop", *(f"parallel.{axis}=1" for axis in ("dp", "tp", "pp"))])
    training = build_training(config, Mesh.single())
    training.step(0)
    began = time.perf_counter()
    tokens = sum(training.step(step).tokens for step in range(1, steps + 1))
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokenizer")
    parser.add_argument("--json")
    options = parser.parse_args()
    texts = [document.decode() for document in read_documents("builtin")]
    texts *= max(1, options.megabytes * 10**6 // sum(map(len, texts)))
    random.Random(0).shuffle(texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = options.tokenizer or trained(folder, texts[:400])
        (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        bare_s, bare_tokens = bare(tokenizer, texts, options.workers)
        began = time.perf_counter()
        made = make_token_file(
            [folder / "corpus.jsonl"],
            folder / "corpus",
            tokenizer=tokenizer,
            workers=options.workers,
            slice_bytes=2 << 20,
        )
        ours_s = time.perf_counter() - began
        reads = {length: loader_rate(folder / "corpus", made.vocab, length) for length in (128, 1024, 4096)}
    found = {
        "workers": options.workers,
        "bare_tokens_per_s": bare_tokens / bare_s,
        "tokenize_tokens_per_s": (made.counts.tokens - made.counts.documents) / ours_s,
        "loader_tokens_per_s": {str(length): rate for length, rate in reads.items()},
        "training_tokens_per_s": training_rate(),
    }
    found["tokenize_to_bare"] = found["tokenize_tokens_per_s"] / found["bare_tokens_per_s"]
    found["loader_to_training"] = reads[128] / found["training_tokens_per_s"]
    text = json.dumps(found, indent=1, default=np.ndarray.tolist)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
