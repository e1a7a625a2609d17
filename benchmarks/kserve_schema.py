"""Is examples/kserve.yaml what KServe's published schema allows? `pip install jsonschema`, then

    python benchmarks/kserve_schema.py --schema FILE

FILE is KServe's CustomResourceDefinition of InferenceService, or the JSON schema a cluster gives for it. Fields the
schema does not list are errors here. To show that they are found, each field of the example is misspelled once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

EXAMPLE = Path(__file__).parent.parent / "examples" / "kserve.yaml"


def find_schema(document: dict[str, Any], version: str) -> Any:
    """The schema itself; metadata, which no CRD describes, may be any object."""
    if document.get("kind") == "CustomResourceDefinition":
        document = next(v["schema"]["openAPIV3Schema"] for v in document["spec"]["versions"] if v["name"] == version)
    return closed({**document, "properties": {**document["properties"], "metadata": {"type": "object"}}})


def closed(schema: Any) -> Any:
    """The same schema with every object limited to the properties it lists."""
    if not isinstance(schema, dict):
        return [closed(item) for item in schema] if isinstance(schema, list) else schema
    limit = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**limit, **{name: closed(value) for name, value in schema.items()}}


def misspelled(node: Any) -> Iterator[tuple[str, Any]]:
    """Each field with a copy of the document in which its name has a letter too many."""
    if isinstance(node, list):
        for position, item in enumerate(node):
            yield from ((field, [*node[:position], new, *node[position + 1 :]]) for field, new in misspelled(item))
    for key in node if isinstance(node, dict) else ():
        yield key, {f"{name}x" if name == key else name: value for name, value in node.items()}
        yield from ((f"{key}.{field}", {**node, key: new}) for field, new in misspelled(node[key]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schema", type=Path, required=True)
    published = yaml.safe_load(parser.parse_args().schema.read_text("utf-8"))
    example = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    validator = Draft7Validator(find_schema(published, example["apiVersion"].rpartition("/")[2]))
    faults = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(example)]
    if faults:
        sys.exit("\n".join(faults))
    refused = {field: not validator.is_valid(wrong) for field, wrong in misspelled(example) if field[:5] == "spec."}
    free = [field for field, caught in refused.items() if not caught]
    sys.stdout.write(f"no fault; {len(refused) - len(free)} of {len(refused)} fields are refused when misspelled\n")
    sys.stdout.write(f"any name is allowed at: {', '.join(free) or 'none of them'}\n")
