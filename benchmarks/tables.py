"""Tables as the documentation has them."""


def markdown(cells: list[list[str]]) -> str:
    """The first row is the head."""
    head, *body = cells
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
