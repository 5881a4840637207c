"""The sites of a run, as its folder remembers them."""

from __future__ import annotations

import statistics
import uuid
from pathlib import Path

from pydantic import ValidationError, model_validator

from flatfed.core.errors import FlatfedError, check_choice, one_line
from flatfed.deployment.spec import FederationSettings
from flatfed.deployment.wire import RunName, SampleCount, SampleForm, SiteDescription, SiteName
from flatfed.runs.files import read_json


class Sites(SampleForm):
    """The sites of a run: client i is always the same one."""

    run: RunName
    """A name of this run alone, so that sites never use what they kept for another."""
    names: list[SiteName]
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

    def check(self, settings: FederationSettings, weighting: str) -> None:
        """Refuses a folder of other clients, and claims that would make one site's word the others' law."""
        clients, names = settings.clients, ", ".join(self.names)
        same = len(self.names) == clients if isinstance(clients, int) else self.names == sorted(set(clients))
        if not same:
            raise FlatfedError(
                f"clients = {clients}: the run in the folder is that of {names}; choose another folder or "
                "the same clients"
            )
        for name in settings.leave_out:
            check_choice("leave_out", name, self.names)
        median, ratio = statistics.median_low(self.samples), settings.max_samples_ratio
        for name, samples in zip(self.names, self.samples, strict=True):
            if weighting == "samples" and len(self.names) > 2 and samples > ratio * median:
                raise FlatfedError(
                    f"max_samples_ratio = {ratio:g}: {name} claims {samples} samples, which are its weight, "
                    f"and the median is {median}; leave it out of clients, or raise max_samples_ratio"
                )
