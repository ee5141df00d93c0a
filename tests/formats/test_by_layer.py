"""Formats by layer, and the file that holds them."""

import json
from pathlib import Path

import pytest

from qkvcache.formats import FP8, REGISTRY, FormatByLayer, HadaQuant, Int8, resolve

NAMES = ["int8", "hadaquant_k3v3", "int8"]
FORMATS = tuple(REGISTRY[name] for name in NAMES)


def test_names_and_objects_in_a_sequence():
    found = resolve(["int8", HadaQuant(3, 3), REGISTRY["int8"]])
    assert found == FormatByLayer(FORMATS) and hash(found) == hash(FormatByLayer(FORMATS))
    assert resolve(found) is found and resolve(tuple(NAMES)) == found
    assert found.for_layers(3) == FORMATS and REGISTRY["int8"].for_layers(2) == (Int8(), Int8())
    assert found.name == "2 int8 + 1 hadaquant_k3v3"
    assert found.bytes_per_token(128, 8) == (2 * REGISTRY["int8"].bytes_per_token(128, 8) + 8 * 100) / 3


@pytest.mark.parametrize(
    ("format", "error", "says"),
    [
        ([], ValueError, "pass a format for each"),
        (["int8", "int9"], ValueError, "format='int9' is unknown: did you mean 'int"),
        (["int8", None], TypeError, "format 1 of 2 is None: expected a name"),
        ([["int8"], "int8"], TypeError, r"format 0 of 2 is \['int8'\]"),
        ([FormatByLayer(FORMATS)], TypeError, "format 0 of 1 is FormatByLayer"),
    ],
)
def test_sequences_that_are_refused(format, error, says):
    with pytest.raises(error, match=says):
        resolve(format)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_another_number_of_layers_is_refused(count):
    with pytest.raises(ValueError, match=f"3 formats for {count} full-attention layers: pass one for all, or one for each"):
        FormatByLayer(FORMATS).for_layers(count)


def test_a_file_holds_classes_and_their_options(tmp_path):
    path, formats = tmp_path / "formats.json", FormatByLayer((Int8(), HadaQuant(2, 4, center=False), FP8("e5m2")))
    formats.save(path, model="llama", bits=3)
    assert all(resolve(given) == formats for given in (path, str(path)))
    content = json.loads(path.read_text())
    assert content["formats"][1] == {"format": "HadaQuant", "key_bits": 2, "value_bits": 4, "center": False}
    assert content["model"] == "llama" and content["bits"] == 3
    path.rename(tmp_path / "formats")
    assert resolve(str(tmp_path / "formats")) == formats  # a path by its separator


def test_formats_of_ones_own_are_not_written(tmp_path):
    class Own(Int8):
        pass

    with pytest.raises(ValueError, match="a file holds formats of Identity, Int8"):
        FormatByLayer((Own(),)).save(tmp_path / "formats.json")
    assert not list(tmp_path.iterdir())


HEAD = '{"file": "qkvcache formats by layer", "version": 2, "formats": '


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no calibration file"),
        ("\x80", "no calibration file"),
        ("[1]", "does not begin with"),
        ('{"formats": ["int8"]}', "does not begin with"),
        ('{"file": "qkvcache formats by layer", "version": 1, "formats": ["int8"]}', "version 1: this release reads 2"),
        (HEAD + "1}", "damaged"),
        (HEAD + '["int8"]}', "damaged"),
        (HEAD + '[{"format": "Int9"}]}', "KeyError.'Int9'"),
        (HEAD + '[{"format": "Int8", "bits": 8}]}', "damaged: TypeError.*unexpected keyword argument 'bits'"),
        (HEAD + '[{"format": "Int8", "scale": "row"}]}', "scale='row': expected"),
        (HEAD + "[]}", "pass a format for each"),
    ],
)
def test_other_files_are_refused_by_their_name(content, says, tmp_path):
    path = tmp_path / "formats.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=says) as caught:
        resolve(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there():
    for path in (Path("nowhere.json"), "nowhere.json", "./nowhere"):
        with pytest.raises(FileNotFoundError):
            resolve(path)
