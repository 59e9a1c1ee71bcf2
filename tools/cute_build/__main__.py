"""``python tools/cute_build packages/sampling out [--keep folder]``: build one family's library by hand.

--keep stores the PTX and the machine code of every kernel. KESTREL_ARCHS selects the architectures, KESTREL_VARIANTS (a
regular expression) the kernels. CMake, which builds the families with CUDA C++, calls --describe to configure and
--object for one object file instead of the library.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cute_build import driver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="folder of the distribution, for example packages/sampling")
    parser.add_argument("output", type=Path, help="where the library and its manifest go")
    parser.add_argument("--keep", type=Path, help="folder for the PTX and cubin of every kernel")
    parser.add_argument("--object", action="store_true", help="output is one object file to link")
    parser.add_argument("--describe", action="store_true", help="print the runtime library and the entry points")
    options = parser.parse_args()
    source = options.package.resolve() / "src"
    (package,) = (path.parent.name for path in source.glob("*/__init__.py"))
    family, archs = driver.Family(source, package), driver.archs_from_environment()
    if options.describe:
        print(driver.find_runtime_folder() / driver.RUNTIME, *driver.function_names(family, archs), sep=";")
    elif options.object:
        driver.build_object(family, options.output, archs, options.keep)
    else:
        for file in driver.build(family, options.output, archs, options.keep):
            print(file, file.stat().st_size)


if __name__ == "__main__":
    main()
