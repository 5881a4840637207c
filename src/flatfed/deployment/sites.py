"""The sites of a run, as its folder remembers them."""

from __future__ import annotations

import uuid
from pathlib import Path

from pydantic import ValidationError, model_validator

from flatfed.core.errors import FlatfedError, one_line
from flatfed.deployment.wire import RunName, SampleCount, SampleForm, SiteDescription
from flatfed.runs.files import read_json


class Sites(SampleForm):
    """The sites of a run: client i is always the same one."""

    run: RunName
    """A name of this run alone, so that sites never use what they kept for another."""
    names: list[str]
    samples: list[SampleCount]

    @model_validator(mode="after")
    def _as_many(self) -> Sites:
        if not self.names or len(self.names) != len(self.samples):
            raise ValueError(f"samples: {len(self.samples)} numbers for {len(self.names)} names")
        return self

    @classmethod
    def of(cls, descriptions: dict[str, SiteDescription]) -> Sites:
        first_name, *names = descriptions
        form = descriptions[first_name].model_dump(include=set(SampleForm.model_fields))
        for name in names:
            for what, there in form.items():
                here = getattr(descriptions[name], what)
                if here != there:
                    raise FlatfedError(
                        f"{what}: {here} at {name}, {there} at {first_name}; all sites need the same form"
                    )
        samples = [site.samples for site in descriptions.values()]
        return cls(run=uuid.uuid4().hex, names=list(descriptions), samples=samples, **form)

    @classmethod
    def stored(cls, folder: Path) -> Sites | None:
        """Those of the run that is in the folder, if there is one."""
        path = folder / "config.json"
        if not path.exists():
            return None
        try:
            return cls.model_validate(read_json(path)["federation"])
        except ValidationError as error:
            complaint = one_line(error, cls.model_fields, prefix="federation")
            raise FlatfedError(f"{path}: {complaint}; restore the file or choose another folder") from None
        except (KeyError, TypeError):
            raise FlatfedError(
                f"{folder}: it holds a run that was no federation; choose another folder"
            ) from None

    def check(self, clients: int | tuple[str, ...]) -> None:
        same = len(self.names) == clients if isinstance(clients, int) else self.names == sorted(set(clients))
        if not same:
            raise FlatfedError(
                f"clients = {clients}: the run in the folder is that of {', '.join(self.names)}; choose "
                "another folder or the same clients"
            )
