"""The report in a real browser: all is drawn, nothing is loaded, it fits a phone and a sheet of paper."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flatfed.report import write_report
from report.example import write_comparison, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'&%{x}"
PHONE, DESK, PAPER = (360, 740), (1280, 900), (690, 1000)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_comparison(root)
    write_run(root / "hostile", HOSTILE, note=HOSTILE)
    return root


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report([runs], path)
    return path


def opened(browser, report: Path, size: tuple[int, int] = DESK, media: str = "", dark: bool = False) -> None:
    width, height = size
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(report.as_uri())
    browser.execute_script("localStorage.clear()")


def draw(browser, selector: str = "figure") -> None:
    """Scrolls to figures and waits until they are drawn."""
    browser.execute_async_script(
        """const [selector, done] = arguments;
        (async () => {
          for (const figure of document.querySelectorAll(selector)) {
            figure.scrollIntoView({ behavior: "instant", block: "center" });
            while (!figure.dataset.drawn) await new Promise((next) => setTimeout(next, 20));
          }
          window.scrollTo({ top: 0, behavior: "instant" });
          done();
        })();""",
        selector,
    )


def screenshot(browser, path: Path) -> None:
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(shot["data"]))


def saved(browser, selector: str) -> str:
    """The content of the file that a button gives."""
    return browser.execute_async_script(
        """const [selector, done] = arguments;
        const make = URL.createObjectURL;
        URL.createObjectURL = (blob) => { blob.text().then(done); return make(blob); };
        HTMLAnchorElement.prototype.click = () => {};
        document.querySelector(selector).click();
        URL.createObjectURL = make;""",
        selector,
    )


def summary_column(browser, header: str) -> list[str]:
    return browser.execute_script(
        """const table = document.querySelector(".table[data-name=summary] table");
        const headers = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.replace(/\\s/g, " "));
        const column = headers.indexOf(arguments[0]);
        return [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);""",
        header,
    )


def test_every_figure_is_drawn_without_errors_or_requests(browser, report, tmp_path):
    opened(browser, report)
    draw(browser)
    kinds = browser.execute_script(
        """const layers = ["scatterlayer", "heatmaplayer", "boxlayer", "contourlayer"];
        const shapes = layers.flatMap((layer) => [`.${layer} path`, `.${layer} image`]).join();
        return [...document.querySelectorAll("figure")].map((figure) => [
          figure.dataset.figure,
          figure.querySelectorAll(shapes).length,
          figure.querySelectorAll("canvas").length]);"""
    )
    assert len(kinds) > 20
    for name, shapes, canvases in kinds:
        assert canvases > 0 if re.search(r"surface-\d", name) else shapes > 0, name
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert report.as_uri() in requested
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requested)
    screenshot(browser, tmp_path / "light.png")


def test_names_are_shown_as_they_are(browser, report):
    opened(browser, report)
    draw(browser, "[data-figure='0-clients-box']")
    assert browser.execute_script("return window.hacked") is None
    assert HOSTILE in summary_column(browser, "method")
    labels = browser.execute_script(
        """const ticks = document.querySelectorAll("[data-figure='0-clients-box'] .ytick");
        return [...ticks].map((tick) => tick.textContent);"""
    )
    # plotly would read "%{" in its templates.
    assert HOSTILE.replace("%{", "% {") in labels


@pytest.mark.parametrize("header", ["accuracy %", "method", "MB down"])
def test_tables_are_sorted_by_the_column_pressed(browser, report, header):
    opened(browser, report)
    before = summary_column(browser, header)

    def value(text: str) -> float | str:
        return text if header == "method" else float(text.partition(" ±")[0])

    for reverse in (False, True):
        browser.execute_script(
            """const headers = [...document.querySelectorAll(".table[data-name=summary] th button")];
            headers.find((each) => each.textContent.replace(/\\s/g, " ") === arguments[0]).click();""",
            header,
        )
        after = summary_column(browser, header)
        assert sorted(before) == sorted(after)
        values = [value(text) for text in after]
        assert values == sorted(values, reverse=reverse)


def test_cells_without_a_value_come_last_either_way(browser, report):
    opened(browser, report)
    order = []
    for _ in range(2):
        order.append(
            browser.execute_script(
                """const table = document.querySelector(".table[data-name=constants] table");
                table.tHead.rows[0].cells[3].querySelector("button").click();
                return [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);"""
            )
        )
    assert order[0] == order[1]


def test_the_legend_hides_a_method_in_every_figure(browser, report):
    opened(browser, report)
    chosen = "[data-figure='0-test_accuracy-rounds'], [data-figure='0-clients-box']"
    draw(browser, chosen)

    def shown() -> set[str]:
        return set(
            browser.execute_script(
                """const figures = [...document.querySelectorAll(arguments[0])];
                const plots = figures.map((each) => each.querySelector(".plot"));
                return plots.flatMap((plot) => plot.data.map((trace) => trace.name));""",
                chosen,
            )
        )

    before = shown()

    def in_view() -> list[bool]:
        """Whether its surface and its rows of tables can be seen."""
        return browser.execute_script(
            """const rows = [...document.querySelectorAll("tbody tr")];
            const own = rows.filter((row) => row.cells[0].textContent === arguments[0]);
            const surface = document.querySelector("[data-figure='0-surface-1']");
            return [surface, ...own].map((each) => each.offsetHeight > 0);""",
            name,
        )

    name = browser.execute_script("return document.querySelectorAll('.legend button')[1].textContent.trim()")
    assert len(in_view()) > 5 and all(in_view())
    browser.execute_script("document.querySelectorAll('.legend button')[1].click()")
    assert name in before and name not in shown()
    assert not any(in_view())
    browser.execute_script("document.querySelectorAll('.legend button')[1].click()")
    assert shown() == before and all(in_view())


def test_dark_mode_follows_the_system_and_the_button(browser, report, tmp_path):
    def lightness() -> int:
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    def text_colour() -> str:
        return browser.execute_script("return document.querySelector('figure .plot').layout.font.color")

    opened(browser, report, dark=True)
    draw(browser)
    assert lightness() < 150
    dark_text = text_colour()
    screenshot(browser, tmp_path / "dark.png")
    browser.execute_script("document.getElementById('theme').click()")
    assert lightness() > 600
    assert text_colour() != dark_text


def test_a_phone_needs_no_sideways_scrolling(browser, report, tmp_path):
    opened(browser, report, PHONE)
    draw(browser)
    width, beyond = browser.execute_script(
        """const beyond = [...document.querySelectorAll(".card, .card .plot, h1, h3, .lead")]
          .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
          .map((each) => each.outerHTML.slice(0, 80));
        document.querySelectorAll("details").forEach((each) => { each.open = true; });
        return [document.documentElement.scrollWidth, beyond];"""
    )
    assert width <= PHONE[0]
    assert beyond == []
    # Names keep their letters together: a short one takes one line.
    heights = browser.execute_script(
        """const cells = [...document.querySelectorAll(".table[data-name=summary] td:first-child")];
        return cells.filter((cell) => cell.textContent === "fedmoswa").map((cell) => cell.offsetHeight);"""
    )
    assert len(heights) == 1 and heights[0] < 45
    screenshot(browser, tmp_path / "phone.png")


def test_paper_shows_every_figure_inside_its_frame(browser, report, tmp_path):
    opened(browser, report, PAPER, media="print", dark=True)
    browser.execute_async_script(
        """const done = arguments[0];
        const look = () => { window.Plotly ? done() : setTimeout(look, 20); };
        look();"""
    )
    # Nothing has been scrolled to; printing itself must draw.
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    found = browser.execute_async_script(
        """const done = arguments[0];
        (async () => {
          const figures = [...document.querySelectorAll("figure")];
          const left = () => figures.filter((each) => !each.dataset.drawn).length;
          while (left()) await new Promise((next) => setTimeout(next, 20));
          const right = (each) => each.getBoundingClientRect().right;
          const wide = [...document.querySelectorAll("figure, .table")]
            .filter((each) => right(each.querySelector(".main-svg, table")) > right(each) + 1)
            .map((each) => each.dataset.figure ?? each.dataset.name);
          const controls = [...document.querySelectorAll("nav, #theme, .save")];
          const hidden = controls.every((each) => !each.offsetWidth);
          const configs = [...document.querySelectorAll("details")].every((each) => each.open);
          done([wide, hidden, configs, getComputedStyle(document.body).backgroundColor]);
        })();"""
    )
    assert found == [[], True, True, "rgb(255, 255, 255)"]
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert not browser.execute_script("return document.querySelectorAll('details[open]').length")
    opened(browser, report)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    pdf = base64.b64decode(printed["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 5
    (tmp_path / "print.pdf").write_bytes(pdf)


def test_a_figure_that_cannot_be_drawn_does_not_cost_the_others(browser, report):
    opened(browser, report)
    browser.execute_async_script(
        """const done = arguments[0];
        const look = () => {
          if (!window.Plotly) { setTimeout(look); return; }
          const react = Plotly.react;
          Plotly.react = (box, ...more) => {
            if (box.closest("[data-figure='0-surface-1']")) throw new Error("all null");
            return react(box, ...more);
          };
          done();
        };
        look();"""
    )
    draw(browser)
    bad = browser.execute_script(
        """return [...document.querySelectorAll("figure")].filter((each) => each.dataset.drawn !== "yes")
          .map((each) => [each.dataset.figure, each.querySelector(".plot").textContent]);"""
    )
    assert bad == [["0-surface-1", "This figure could not be drawn."]]


def test_ticks_of_logarithmic_axes_are_whole_numbers(browser, report):
    opened(browser, report)
    draw(browser, "[data-figure='0-test_loss-rounds']")
    kind, ticks = browser.execute_script(
        """const figure = document.querySelector("[data-figure='0-test_loss-rounds']");
        const ticks = [...figure.querySelectorAll(".ytick text")].map((tick) => tick.textContent);
        return [figure.querySelector(".plot").layout.yaxis.type, ticks];"""
    )
    assert kind == "log"
    values = [float(tick) for tick in ticks]
    assert len(values) > 2 and values == sorted(values)


def test_turning_one_surface_turns_the_others(browser, report):
    opened(browser, report)
    surfaces = "[data-figure='0-surface-1'], [data-figure='0-surface-2']"
    draw(browser, surfaces)
    eyes = browser.execute_async_script(
        """const [surfaces, done] = arguments;
        const plots = [...document.querySelectorAll(surfaces)].map((each) => each.querySelector(".plot"));
        const camera = { ...plots[0].layout.scene.camera, eye: { x: 2, y: 0.5, z: 0.25 } };
        Plotly.relayout(plots[0], { "scene.camera": camera });
        const eyes = () => plots.map((plot) => plot.layout.scene.camera.eye);
        const look = (times) => {
          if (times === 0 || eyes().every((eye) => eye.x === 2)) done(eyes());
          else setTimeout(look, 100, times - 1);
        };
        look(200);""",
        surfaces,
    )
    assert eyes == [{"x": 2, "y": 0.5, "z": 0.25}] * 2


def test_the_data_of_a_figure_are_the_means_over_seeds(browser, report, runs):
    opened(browser, report)
    text = saved(browser, "[data-figure='0-test_accuracy-megabytes'] [data-save=csv]")
    header, *rows = csv.reader(io.StringIO(text))
    assert header == ["method", "megabytes sent, both ways", "test accuracy (%)", "standard deviation"]
    found = [[float(value) for value in row[1:]] for row in rows if row[0] == "fedsam"]
    histories = [
        [json.loads(line) for line in (runs / f"fedsam-{seed}" / "history.jsonl").read_text().splitlines()]
        for seed in range(2)
    ]
    sent = 0.0
    assert len(found) == len(histories[0])
    for place, row in enumerate(found):
        lines = [history[place] for history in histories]
        sent += statistics.fmean(line["bytes_up"] + line["bytes_down"] for line in lines) / 1e6
        values = [100 * line["test_accuracy"] for line in lines]
        assert row == pytest.approx([sent, statistics.fmean(values), statistics.stdev(values)], rel=1e-4)
    assert {row[0] for row in rows} == {"fedavg", "fedsam", "fedmoswa", HOSTILE}


def test_every_figure_has_data_to_download(browser, report):
    opened(browser, report)
    names = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map((figure) => figure.dataset.figure)"
    )
    for name in names:
        header, *rows = csv.reader(io.StringIO(saved(browser, f"[data-figure='{name}'] [data-save=csv]")))
        assert rows, name
        assert {len(row) for row in rows} == {len(header)}, name


def test_tables_become_latex_and_markdown(browser, report):
    opened(browser, report)
    names = summary_column(browser, "method")
    latex = saved(browser, ".table[data-name=summary] [data-save=tex]").splitlines()
    assert latex[1] == r"\begin{tabular}{l" + "r" * (latex[3].count("&")) + "}"
    assert latex[-1] == r"\end{tabular}"
    bodies = latex[latex.index(r"  \midrule") + 1 : latex.index(r"  \bottomrule")]
    assert len(bodies) == len(names)
    assert all(line.endswith(r" \\") for line in bodies)
    # What is left after the escaped signs must not contain one that LaTeX would act on.
    assert not any(re.search(r"(?<!\\)[%#_]|±", line) for line in bodies)
    markdown = saved(browser, ".table[data-name=summary] [data-save=md]").splitlines()
    assert len(markdown) == len(names) + 2
    assert [line.split(" | ")[0].removeprefix("| ") for line in markdown[2:]] == names


class Links(HTMLParser):
    """The addresses in a page that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag != "a":
            self.found += [
                value for name, value in attributes if name in {"src", "href", "srcset", "data"} and value
            ]


def test_the_file_refers_to_nothing_outside(report):
    text = report.read_text()
    links = Links()
    links.feed(text)
    assert [each for each in links.found if not each.startswith("data:")] == []
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style


def test_ten_methods_over_a_thousand_rounds_stay_small(tmp_path):
    for number in range(10):
        for seed in range(2):
            write_run(
                tmp_path / "runs" / f"{number}-{seed}", "fedsam", seed, rounds=1000, radius=0.1 * number
            )
    write_report([tmp_path / "runs"], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 8e6
