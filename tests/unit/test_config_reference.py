"""The manual holds every key, and the JSON schema what the loader takes."""

import json
from typing import Any

from allforce.config import unsupported
from allforce.config.reference import json_schema, reference_markdown
from allforce.config.schema import Input
from allforce.config.section import aliases, walk


def part(text: str, title: str) -> str:
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_markdown_has_every_key_once_in_its_section() -> None:
    text = reference_markdown()
    for path, cls in walk(Input):
        kind = cls.model_fields.get("type")
        names = [kind.default, *cls.type_aliases] if kind else []
        title = f"`{path}`" if path else "The top level"
        title += ", type " + " or ".join(f'"{name}"' for name in names) if names else ""
        rows = [line for line in part(text, title).splitlines() if line.startswith("| `")]
        assert len(rows) == len(cls.model_fields)
        for row, (name, field) in zip(rows, cls.model_fields.items(), strict=True):
            assert row.startswith(f"| `{name}`") and field.description and field.description.replace("|", "\\|") in row
            assert row.replace("\\|", "").count("|") == 6, row
            assert all(f"`{alias}`" in row for alias in aliases(field))


def test_markdown_examples() -> None:
    text = reference_markdown()
    assert "| `rcut` | a number > 0 | `6.0` | - | Cutoff radius in Å. |" in text
    assert "| `start_lr` | a number > 0 | required | - |" in text
    assert "| `sharding` * |" in text and "| `disp_freq` |" in text
    assert '`model/descriptor`, type "se_e2_a" or "se_a"' in text


def test_markdown_lists_what_is_not_supported() -> None:
    text = part(reference_markdown(), "Keys of DeePMD-kit that Allforce does not have")
    assert "| `training/enable_tf32` | `false` |" in text
    assert "| `validating/tf32_infer` | `false` |" in text
    assert all(f"`{name}`" in text for names in unsupported.TYPES.values() for name in names)


def test_no_key_is_both_supported_and_not() -> None:
    for path, cls in walk(Input):
        names = {*cls.model_fields, *(alias for field in cls.model_fields.values() for alias in aliases(field))}
        assert not names & set(unsupported.KEYS.get(path, {}))
        if "type" in cls.model_fields:
            assert not {cls.model_fields["type"].default, *cls.type_aliases} & set(unsupported.TYPES.get(path, ()))
    paths = {path for path, _ in walk(Input)}
    assert set(unsupported.KEYS) <= paths and set(unsupported.TYPES) <= paths


def test_json_schema() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["required"] == ["model", "learning_rate", "training"]
    training = schema["$defs"]["Training"]
    assert training["properties"]["stop_batch"]["description"] == "Another name of numb_steps."
    assert training["properties"]["enable_tf32"] == {"enum": [False]}
    assert training["patternProperties"] == {"^_": {}} and training["additionalProperties"] is False
    assert schema["$defs"]["SeE2AConfig"]["properties"]["type"]["enum"] == ["se_e2_a", "se_a"]
    assert schema["$defs"]["SeE2AConfig"]["properties"]["neuron"]["items"] == {
        "minimum": 1,
        "maximum": 16384,
        "type": "integer",
    }


def test_json_schema_has_only_words_of_json_schema() -> None:
    def words(node: Any) -> set[str]:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return set(node if isinstance(node, dict) else ()).union(*(words(item) for item in inner))

    assert not words(json_schema()) & {"ge", "gt", "le", "lt", "own", "free", "aliases", "discriminator", "oneOf"}
