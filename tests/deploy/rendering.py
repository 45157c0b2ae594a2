"""The chart, rendered by Helm's own library, and the manifests of the documentation made from it.

`python -m tests.deploy.rendering` writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "trio-gateway"
EXAMPLES: Final = ROOT / "deploy" / "helm" / "examples"
MANIFESTS: Final = ROOT / "docs" / "examples" / "kubernetes"
NAMES: Final = tuple(sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
RELEASE: Final = "llm"
NAMESPACE: Final = "inference"


def values_of(name: str) -> dict[str, Any]:
    """The values of an example."""
    import yaml

    values: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text("utf-8"))
    return values


def render(values: Mapping[str, Any]) -> dict[str, str]:
    """Texts by the template's name; raises what Helm says where it refuses the values."""
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(dict(values))
        rendered: dict[str, str] = chart.render(dict(values), name=RELEASE, namespace=NAMESPACE)
    return {Path(name).name: text for name, text in sorted(rendered.items()) if text.strip()}


def objects(rendered: Mapping[str, str]) -> list[dict[str, Any]]:
    """All that would be applied."""
    import yaml

    return [each for text in rendered.values() for each in yaml.safe_load_all(text) if each]


def manifest(name: str) -> str:
    """One file that `kubectl apply -f` takes."""
    head = f"# Made from the chart by `make manifests`, with deploy/helm/examples/{name}.yaml.\n"
    texts = []
    for text in render(values_of(name)).values():
        lines = (line.rstrip() for line in text.strip().removeprefix("---").strip().splitlines())
        texts.append("---\n" + "\n".join(lines) + "\n")
    return head + "".join(texts)


if __name__ == "__main__":
    for each in NAMES:
        (MANIFESTS / f"{each}.yaml").write_text(manifest(each), "utf-8")
        sys.stdout.write(f"written: docs/examples/kubernetes/{each}.yaml\n")
