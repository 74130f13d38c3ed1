"""Files of rows, read a part at a time: JSON lines, a JSON list, Parquet; plain, or compressed by gzip or zstd.

A part is small and says nothing of a row but where it begins: the process that tokenizes it parses it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlexp.base import plain_json
from rlexp.base.errors import DataError
from rlexp.base.file_hashes import contents

PART = 1 << 20  # bytes after which a part ends
MOST_ROWS = 512  # of a part
LONGEST = 1 << 28  # bytes of a line, of an element of a JSON list, or of a row of Parquet
MOST_BYTES = 1 << 25  # of rows of Parquet that are decoded at once, unless one is longer
OTHERS = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
}
READ = "JSON lines, a JSON list or Parquet, plain or compressed by gzip or zstd"
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class Unreadable:
    """A row that is no JSON object, and why."""

    rule: str


FileRow = bytes | Mapping[str, Any] | Unreadable  # a line of JSON, or a row that is parsed already


@dataclass(frozen=True)
class FilePart:
    """Rows that stand together in a file."""

    first: int  # number of its first row, from 1
    rows: Sequence[FileRow]
    done: int  # how far its source was read for it, in bytes of the disk


PartOf = tuple[int, FilePart]  # a file's number, and a part of it


@dataclass(frozen=True)
class Files:
    """Files of rows, read one after the other."""

    paths: tuple[Path, ...]
    version: ClassVar[None] = None  # a run is identified by their contents

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.paths))

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def contents(self) -> list[str]:
        return [contents(path) for path in self.paths]

    def parts(self) -> Iterator[PartOf]:
        before = 0
        for number, path in enumerate(self.paths):
            for part in parts_of(path):
                yield number, replace(part, done=before + part.done)
            before += path.stat().st_size


def parts_of(path: Path) -> Iterator[FilePart]:
    """Yield the parts of a file, in order. How it is cut depends on its content alone."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            other = next((name for magic, name in OTHERS.items() if start.startswith(magic)), None)
            if other is not None:
                raise DataError(f"{path}: is {other}, which is not read. Give {READ}.")
            if start.startswith(b"PAR1"):
                yield from _parquet(path)
                return
            file.seek(0)
            codec = next((codec for magic, codec in COMPRESSED.items() if start.startswith(magic)), None)
            raw: Any = file if codec is None else pa.CompressedInputStream(pa.PythonFile(file), codec)
            stream = io.BufferedReader(raw, PART)
            rows = _elements(stream, path) if _is_list(stream) else _lines(stream, path)
            yield from together(rows, lambda _rows: file.tell())
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())}).") from None


def _is_list(stream: io.BufferedReader) -> bool:
    """Look at the first characters that are no space: a list of objects. One line that is a list is a bad row."""
    text = stream.peek(PART).removeprefix(codecs.BOM_UTF8).lstrip()
    return text[:1] == b"[" and text[1:].lstrip()[:1] in (b"{", b"]", b"")


def _lines(stream: io.BufferedReader, path: Path) -> Iterator[tuple[FileRow, int]]:
    number = 1
    while line := stream.readline(LONGEST):
        if len(line) == LONGEST and not line.endswith(b"\n"):
            raise DataError(f"{path}:{number}: is longer than {LONGEST >> 20} MiB. Is it a file of rows?")
        yield line, len(line)
        number += 1


def _elements(stream: io.BufferedReader, path: Path) -> Iterator[tuple[FileRow, int]]:
    """Yield the elements of a JSON list with their sizes, without holding the list."""
    text, number = _Text(stream), 1
    try:
        text.take()
        while text.next() != "]":
            if number > 1 and text.take() != ",":
                raise DataError(f"{path}: a comma or ] must follow row {number - 1}.")
            row, size = text.value()
            yield _in_utf8(row), size
            number += 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: row {number} is not UTF-8 text ({error.reason}).") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{path}: row {number} is not JSON ({reason}).") from None


class _Text:
    """The text of a stream, read as far as it is needed."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream, self._utf8 = stream, codecs.getincrementaldecoder("utf-8-sig")()
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False

    def _more(self) -> bool:
        if self._ended or len(self._text) - self._at > LONGEST:
            return False
        block = self._stream.read(max(PART, len(self._text) - self._at))  # at least as much again: linear in all
        self._ended = not block
        self._text, self._at = self._text[self._at :] + self._utf8.decode(block, final=self._ended), 0
        return True

    def next(self) -> str:
        """Return the next character that is no space, and stay before it; "" at the end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def take(self) -> str:
        mark = self.next()
        self._at += 1
        return mark

    def value(self) -> tuple[Any, int]:
        """Return the next value and the length of its text."""
        self.next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError:
                if not self._more():
                    raise
                continue
            if end == len(self._text) and self._more():  # it may go on, as a number does
                continue
            size, self._at = end - self._at, end
            return value, size


def _parquet(path: Path) -> Iterator[FilePart]:
    """Read texts as dictionaries, as the file has them: a text that stands there once may be the value of every row."""
    metadata, schema, size = pq.read_metadata(path), pq.read_schema(path), path.stat().st_size
    texts = [field.name for field in schema if _is_text(field.type)]
    table = pq.ParquetFile(path, metadata=metadata, read_dictionary=texts)
    rows = (row for batch in table.iter_batches(_at_once(metadata, schema)) for row in rows_of(batch, schema))
    return together(rows, lambda read: size * read // max(1, metadata.num_rows))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _at_once(metadata: pq.FileMetaData, schema: pa.Schema) -> int:
    """Return how many rows may be decoded at once. Lists and JSON are read as no dictionary, which Arrow cannot always
    do: each of their rows may have all bytes of the column."""
    most, shared = MOST_ROWS, {field.name for field in schema if _is_text(field.type) or field.type.num_fields == 0}
    shared -= {field.name for field in schema if _holds_json(field.type)}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        row = 0
        for chunk in map(group.column, range(group.num_columns)):
            rows = max(1, group.num_rows) if chunk.path_in_schema.split(".")[0] in shared else 1
            row += chunk.total_uncompressed_size // rows
        most = min(most, LONGEST // max(1, row))
    return max(1, most)


def rows_of(batch: pa.RecordBatch | pa.Table, schema: pa.Schema | None = None) -> Iterator[tuple[FileRow, int]]:
    """Yield the rows of a batch of Arrow, each with its share of the batch's bytes. Its texts may be dictionaries, in
    place of what the schema says; few rows are decoded at once where they are long.
    """
    size = sum(map(_decoded_size, batch.columns))
    if size > MOST_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from rows_of(batch.slice(0, half), schema)
        yield from rows_of(batch.slice(half), schema)
        return
    if size > LONGEST:
        yield Unreadable(f"is longer than {LONGEST >> 20} MiB. Is it a file of rows?"), PART
        return
    if schema is not None:
        with contextlib.suppress(pa.ArrowNotImplementedError):  # from a dictionary to a view: slower, but the same
            batch = batch.cast(schema)
    share = -(-size // max(1, batch.num_rows))
    kinds = {column.name: column.type for column in batch.schema if _holds_json(column.type)}
    for row in batch.to_pylist():
        yield _with_json(row, kinds), share


def _decoded_size(column: Any) -> int:
    """Return the bytes that a column has when each value stands for itself."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):
        return sum(map(_decoded_size, column.chunks))
    if pa.types.is_dictionary(kind) and (_is_text(kind.value_type) or pa.types.is_binary(kind.value_type)):
        return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_decoded_size, column.flatten()))
    if pa.types.is_nested(kind) and hasattr(column, "flatten"):  # a union has none
        return _decoded_size(column.flatten())
    return int(column.nbytes)


def _with_json(row: Mapping[str, Any], kinds: Mapping[str, pa.DataType]) -> Mapping[str, Any] | Unreadable:
    try:
        return _in_utf8({**row, **{name: _decoded(row[name], kind) for name, kind in kinds.items()}}) if kinds else row
    except (ValueError, RecursionError) as error:
        return Unreadable(f"has a column of JSON that is none ({error}).")


def _holds_json(kind: pa.DataType) -> bool:
    """Say whether values are written as JSON: `datasets` does so where rows differ (a prompt as text or messages)."""
    return isinstance(kind, pa.JsonType) or any(_holds_json(kind.field(at).type) for at in range(kind.num_fields))


def _decoded(value: Any, kind: pa.DataType) -> Any:
    if value is None or not _holds_json(kind):
        return value
    if isinstance(kind, pa.JsonType):
        return plain_json.loads(value)
    if pa.types.is_struct(kind):
        return {name: _decoded(each, kind.field(name).type) for name, each in value.items()}
    return [_decoded(each, kind.field(0).type) for each in value]


def together(rows: Iterable[tuple[FileRow, int]], done: Callable[[int], int]) -> Iterator[FilePart]:
    """Cut rows with their sizes into parts; `done` says how far the file was read after so many rows."""
    taken: list[FileRow] = []
    size, first = 0, 1
    for row, bytes_ in rows:
        taken.append(row)
        size += bytes_
        if size >= PART or len(taken) == MOST_ROWS:
            yield FilePart(first, taken, done(first - 1 + len(taken)))
            first, taken, size = first + len(taken), [], 0
    if taken:
        yield FilePart(first, taken, done(first - 1 + len(taken)))


def rows_in(part: FilePart) -> int:
    """Count the rows of a part: all but blank lines."""
    return sum(not isinstance(row, bytes) or bool(row.strip()) for row in part.rows)


def parsed(part: FilePart) -> Iterator[tuple[int, Mapping[str, Any] | Unreadable]]:
    """Yield the rows of a part with their numbers, without blank lines."""
    for number, row in enumerate(part.rows, part.first):
        if not isinstance(row, bytes):
            yield number, row
        elif row.strip():
            try:
                read = _as_row(orjson.loads(row.removeprefix(codecs.BOM_UTF8).rstrip()))
            except orjson.JSONDecodeError:
                read = _slowly(row)
            yield number, read


def _as_row(value: Any) -> Mapping[str, Any] | Unreadable:
    return value if isinstance(value, dict) else Unreadable(f"must be a JSON object, not {type(value).__name__}.")


def _slowly(line: bytes) -> Mapping[str, Any] | Unreadable:
    """Read what is JSON for Python alone (NaN, long numbers), or say why it is none."""
    try:
        return _in_utf8(json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return Unreadable(f"is not UTF-8 text ({error.reason}). Give {READ}.")
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Unreadable(f"is not JSON ({reason}). Give {READ}.")


def _in_utf8(value: Any) -> Mapping[str, Any] | Unreadable:
    """Return a row that Python's own reader made: half a surrogate pair is valid JSON, but no text."""
    try:
        orjson.dumps(value)
    except TypeError:  # a long number is none for orjson either
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return Unreadable(f"is not UTF-8 text ({error.reason}). Give {READ}.")
    return _as_row(value)
