"""The command `flatfed split`."""

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flatfed.cli.terminal import AsJson, console, look, print_facts, print_json, tell
from flatfed.core.errors import printable


@look
def split(
    dataset: Annotated[str, typer.Option(help="A data set; see flatfed data list.")] = "digits",
    clients: Annotated[int, typer.Option(help="Among how many clients.")] = 100,
    partition: Annotated[str, typer.Option(help="How they are divided.")] = "dirichlet_client",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the partition, e.g. concentration=0.1, or of the data set, e.g. "
            "data.options.split=byclass. Repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed in a run gives the same split.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the picture, as .svg or .html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which client holds how many samples of which class."""
    from flatfed.data.partition import PARTITIONS, class_counts, summary
    from flatfed.report.split import check_output, describe, terminal_picture, write_picture
    from flatfed.runs.files import check_replaceable
    from flatfed.training.config import Config, with_assignments

    if output is not None:
        check_output(output)
        check_replaceable(output)
    values: dict[str, Any] = {
        "data": {"dataset": dataset, "clients": clients},
        "partition": {"name": partition},
        "training": {"rounds": 1, "seed": seed},
    }
    if "concentration" in inspect.signature(PARTITIONS.get(partition, object)).parameters:
        values["partition"]["concentration"] = 0.1
    # A key without dots is an option of the partition, one with dots a setting of the config.
    changes = [
        assignment if "." in assignment.partition("=")[0] else f"partition.{assignment}"
        for assignment in assignments or []
    ]
    config = Config.checked(with_assignments(values, changes))
    federation = config.make_federation()
    rows = [federation.rows(client).numpy() for client in range(len(federation))]
    labels = federation.targets.numpy()
    counts, numbers = class_counts(rows, labels, federation.classes or 1), summary(rows, labels)
    options = ", ".join(f"{key} = {value}" for key, value in config.partition.items() if key != "name")
    title = ", ".join(filter(None, [f"{dataset} over {clients} clients", config.partition["name"], options]))
    console.print(printable(title), style="bold", soft_wrap=True)
    print_facts(describe(numbers))
    if as_json:
        print_json(
            {
                "title": title,
                "summary": asdict(numbers),
                "samples_by_client_and_class": counts.tolist(),
            }
        )
    coloured = console.color_system is not None and not console.no_color
    console.print(terminal_picture(counts, min(console.width, 140), coloured))
    if output is not None:
        write_picture(output, counts, f"{title}, seed {seed}", numbers)
        tell(f"picture: {output}")
