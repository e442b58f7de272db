"""Says what a file, or a line of it, looks like that is not raw Criteo text, and what to do about it."""

from __future__ import annotations

import re

from flowtt_torchrec.datasets.criteo_format import NUM_DENSE, NUM_FIELDS

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PREPARE = "convert it with `python -m flowtt_torchrec prepare`"
_UNPACK = "unpack it first: `{}`"
_FORMATS = {
    b"PAR1": ("a Parquet file", _PREPARE),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", _UNPACK.format("zstd -d FILE")),
    b"PK\x03\x04": ("a ZIP archive", _UNPACK.format("unzip FILE")),
    b"BZh": ("compressed by bzip2", _UNPACK.format("bunzip2 FILE")),
    b"\xfd7zXZ\x00": ("compressed by xz", _UNPACK.format("unxz FILE")),
    b"\x04\x22\x4d\x18": ("compressed by LZ4", _UNPACK.format("lz4 -d FILE")),
    b"\x93NUMPY": ("a NumPy array", "give the raw text"),
    b"ARROW1": ("an Arrow (Feather) file", "write it as Parquet, and " + _PREPARE),
    b"Obj\x01": ("an Avro file", "write it as Parquet, and " + _PREPARE),
    b"ORC": ("an ORC file", "write it as Parquet, and " + _PREPARE),
    b"\x89HDF": ("an HDF5 file", "write it as Parquet, and " + _PREPARE),
    b"\xff\xfe": ("text in UTF-16", "write it in ASCII: `iconv -f UTF-16 -t ASCII FILE`"),
    b"\xfe\xff": ("text in UTF-16", "write it in ASCII: `iconv -f UTF-16 -t ASCII FILE`"),
}
LONGEST_MAGIC = max(map(len, _FORMATS))
_SEPARATORS = {
    b",": f"comma-separated values (CSV); {_PREPARE}, or put tabs for the commas: `tr ',' '\\t' < FILE`",
    b";": "values separated by semicolons; put tabs for them: `tr ';' '\\t' < FILE`",
    b"|": "values separated by bars; put tabs for them: `tr '|' '\\t' < FILE`",
    b" ": "values separated by spaces; give the file with its tabs, since a missing value is nothing between two tabs",
}


def describe_file(beginning: bytes) -> str | None:
    """What a file that begins so is, and what to do; None if it may be text.

    Args:
        beginning: at least `LONGEST_MAGIC` bytes, or the whole file.
    """
    for magic, (kind, advice) in _FORMATS.items():
        if beginning.startswith(magic):
            return f"it is {kind}, not text; {advice}"
    return None


def describe_line(line: bytes) -> str | None:
    """What a line that is not in Criteo's format looks like, and what to do; None if nothing is known."""
    line = line.rstrip(b"\r\n")
    if not line.strip():
        return "the line is empty; remove empty lines, also at the end: `sed -i '/^\\s*$/d' FILE`"
    if line.startswith(BYTE_ORDER_MARK):
        return "the file begins with a byte order mark (BOM); remove it: `sed -i '1s/^\\xef\\xbb\\xbf//' FILE`"
    fields = line.split(b"\t")
    if len(fields) == NUM_FIELDS - 1 and _is_number(fields[0]):
        return "is this a test file without labels?"
    if b"\x00" in line and len(fields) != NUM_FIELDS:
        return "the file is binary, not text"
    for separator, meaning in _SEPARATORS.items():
        if len(fields) == 1 and line.count(separator) >= NUM_DENSE:
            return f"it looks like {meaning}"
    # A row may lack any of its values, but has a number for a label; the names of columns are no numbers.
    if fields[0] and not any(_is_number(field) for field in fields[: 1 + NUM_DENSE] if field):
        return "it looks like a header row; remove it: `sed -i 1d FILE`" if len(fields) > 1 else None
    return None


def _is_number(field: bytes) -> bool:
    return re.fullmatch(rb"[-+]?\d+(\.\d*)?", field) is not None
