"""Scores of masked images in files, so that an interrupted evaluation does not compute them again."""

import io
from collections.abc import Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from equicam.shards import write_atomic


class ScoreFiles(MutableMapping[str, Tensor]):
    """Tensors by name, each a file in a folder; those read or written stay in memory. One is written while the next is computed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[str, Tensor]()
        self._writer, self._writing = ThreadPoolExecutor(1), Future[None]()
        self._writing.set_result(None)

    def __enter__(self) -> "ScoreFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last tensor is written; if it could not be, an error that is on its way goes first."""
        self._writer.shutdown()
        if kind is None:
            self._writing.result()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            try:
                self._known[name] = torch.load(self._file(name), map_location="cpu", weights_only=True)
            except FileNotFoundError:
                raise KeyError(name) from None
        return self._known[name]

    def __setitem__(self, name: str, scores: Tensor) -> None:
        self._writing.result()
        self._writing = self._writer.submit(self._write, name, scores.cpu())
        self._known[name] = scores

    def _write(self, name: str, scores: Tensor) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        torch.save(scores, content := io.BytesIO())
        write_atomic(self._file(name), content.getvalue())

    def __delitem__(self, name: str) -> None:
        self._writing.result()
        self._known.pop(name, None)
        self._file(name).unlink()

    def __iter__(self) -> Iterator[str]:
        self._writing.result()
        return (path.stem for path in sorted(self._folder.glob("*.pt")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.pt"
