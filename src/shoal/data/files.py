"""Reading a file that a user handed over: plain or gzipped, and the words for one that is broken."""

import gzip
import zlib
from pathlib import Path

from shoal.core.errors import UserError

GZIP_MAGIC = b"\x1f\x8b"


def broken_file(path: Path, problem: str, can_download: bool) -> UserError:
    """The error for a file that cannot be used: which one, what is wrong with it, what to do."""
    remedy = "delete it to download it again" if can_download else "replace it with a whole copy"
    return UserError(f"data.dir: {path}: {problem}; {remedy}")


def read_content(path: Path, can_download: bool = False) -> bytes:
    """The bytes of a file, unzipped where it starts like gzip, whatever its name; never empty."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.dir: {path}: cannot be read: {error.strerror}") from error
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except EOFError as error:
            raise broken_file(path, "the gzip data ends too early", can_download) from error
        except (OSError, zlib.error) as error:
            raise broken_file(path, f"the gzip data is damaged ({error})", can_download) from error
    if not content:
        raise broken_file(path, "is empty", can_download)
    return content


def read_utf8(path: Path, can_download: bool = False) -> str:
    """The text of a UTF-8 file, gzipped or not, with its line ends as they are."""
    content = read_content(path, can_download)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"data.dir: {path}: line {line} is not UTF-8 (byte 0x{content[error.start]:02x} at {error.start}); "
            f"convert it, for example: iconv -f latin1 -t utf-8 {path.name}"
        ) from error
