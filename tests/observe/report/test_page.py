"""Pages in a real browser: they draw, answer to the mouse and the keyboard, and run nothing but their own script."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.report import write_comparison, write_report
from tests.browser import Browser
from tests.made_run import make_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
SECTIONS = [
    "Where the time went",
    "Curves",
    "Where a step's time goes",
    "The 2 workers",
    "What happened",
    "Checkpoints",
    "Recipe",
    "Environment",
]
FIRST_CHART = "#curves .chart >> nth=0"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("page") / "digits-aaaa")


@pytest.fixture(scope="module")
def page_file(run_dir: Path) -> Path:
    return write_report(run_dir)


def ticks(page: Any, which: str = FIRST_CHART) -> list[str]:
    found: list[str] = page.locator(which).locator("text.tick").all_text_contents()
    return found


def path_of(page: Any, series: int = 0) -> str:
    found: str = page.locator(FIRST_CHART).locator("path.line").nth(series).get_attribute("d")
    return found


def drag(page: Any, begin: float, end: float) -> None:
    """Over the first chart, from one share of its width to another."""
    page.locator(FIRST_CHART).scroll_into_view_if_needed()
    box = page.locator(FIRST_CHART).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()


def test_a_page_opens_in_silence_and_draws_everything(browser: Browser, page_file: Path) -> None:
    opened = browser.open(page_file)
    page = opened.page
    assert page.title() == "digits-aaaa · done"
    assert page.locator("h1").inner_text() == "digits-aaaa"
    assert [heading.inner_text() for heading in page.locator("h2").all()] == SECTIONS
    assert "72% of a step is computing" in page.locator(".verdict-words").inner_text()
    assert page.locator("#curves .chart").count() == 4
    assert len(re.findall(r"[ML]", path_of(page))) == 40 and len(re.findall(r"[ML]", path_of(page, 1))) == 4
    assert page.locator("#steps path.area").count() == 5
    assert page.locator("#ledger .bar span").count() == 5
    assert page.locator("#ledger tbody tr").last.inner_text().split("\t")[0] == "all worker time"
    assert page.locator("#workers tr.slow").inner_text().startswith("1")
    assert page.locator(".timeline .at.bad").count() == 1 and page.locator(".track span").count() == 4
    assert page.locator("#checkpoints tbody tr").count() == 4
    page.locator("#recipe summary").click()
    assert "global_batch: 64" in page.locator("#recipe pre").inner_text()
    page.locator("#recipe button").click()
    page.get_by_text("Copied").wait_for()
    assert opened.is_quiet, (opened.complaints, opened.requests)


def test_a_share_says_what_it_is_of(browser: Browser, page_file: Path) -> None:
    page = browser.open(page_file).page
    assert page.locator("#ledger th", has_text="Of all worker time").count() == 1
    steps = page.locator("#steps")
    assert steps.locator("figcaption .note").inner_text() == "Shares are of a step."
    of_a_step, of_all = (one.inner_text().replace("\n", " ") for one in steps.locator(".legend").all())
    assert "wait for others 8.0 %" in of_a_step and "wait for others 3.2 s · 8.0 %" in of_all
    assert steps.locator("> .note").inner_text().startswith("Shares are of these 40 s, the mean of a worker.")


@pytest.mark.parametrize(("factor", "words"), [(0.9, "Nothing tells what"), (1.02, "more than that, where what two")])
def test_a_ledger_that_does_not_add_up_says_so(
    browser: Browser, run_dir: Path, tmp_path: Path, factor: float, words: str
) -> None:
    folder = Path(shutil.copytree(run_dir, tmp_path / "run"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["seconds"] = {phase: factor * seconds for phase, seconds in line["seconds"].items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = browser.open(write_report(folder)).page.locator("#ledger")
    assert words in ledger.locator(".section-head .note").inner_text()
    assert ("not accounted for" in ledger.inner_text()) == (factor < 1)
    assert not re.search(r"-\d", ledger.locator("tbody").inner_text())


def test_pointing_at_a_chart_shows_its_values(browser: Browser, page_file: Path) -> None:
    page = browser.open(page_file).page
    chart = page.locator(FIRST_CHART)
    chart.scroll_into_view_if_needed()
    assert not chart.locator(".tip").is_visible()
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] * 0.8, "y": box["height"] / 2})
    tip = chart.locator(".tip").inner_text()
    step = int(re.search(r"step (\d+)", tip)[1])  # type: ignore[index]
    reports = [json.loads(line) for line in (page_file.parent / "metrics.jsonl").read_text().splitlines()]
    loss = next(one["metrics"]["train_loss"] for one in reports if one["step"] == step)
    assert f"{loss:.4g}".rstrip("0") in tip and "val" in tip
    assert page.locator("#curves line.cross").count() == 4  # in the other charts too
    page.mouse.move(0, 0)
    assert not chart.locator(".tip").is_visible()


def test_charts_answer_to_the_keyboard(browser: Browser, page_file: Path) -> None:
    page = browser.open(page_file).page
    chart = page.locator(FIRST_CHART)
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert chart.locator(".tip-head").inner_text() == "step 10"
    page.keyboard.press("ArrowRight")
    assert chart.locator(".tip-head").inner_text() == "step 20"
    whole = ticks(page)
    page.keyboard.press("+")
    assert ticks(page) != whole
    page.keyboard.press("Escape")
    assert ticks(page) == whole and not chart.locator(".tip").is_visible()


def test_dragging_zooms_all_curves_and_a_double_click_resets(browser: Browser, page_file: Path) -> None:
    page = browser.open(page_file).page
    reset = page.locator("#curves button.reset")
    whole, other = ticks(page), ticks(page, "#curves .chart >> nth=2")
    assert not reset.is_visible()
    drag(page, 0.4, 0.6)
    assert ticks(page) != whole and ticks(page, "#curves .chart >> nth=2") != other
    assert reset.is_visible()
    page.locator(FIRST_CHART).dblclick()
    assert ticks(page) == whole and not reset.is_visible()
    drag(page, 0.4, 0.6)
    reset.click()
    assert ticks(page) == whole


def test_log_scale_smoothing_and_time(browser: Browser, page_file: Path) -> None:
    page = browser.open(page_file).page
    line, labels = path_of(page), ticks(page)
    page.get_by_label("Log scale").check()
    assert path_of(page) != line and {"0.1", "1"} <= set(ticks(page))
    page.get_by_label("Log scale").uncheck()
    assert path_of(page) == line
    page.locator("#curves").get_by_text("time", exact=True).click()
    assert ticks(page) != labels and any(tick.endswith(" s") for tick in ticks(page))
    page.locator("#curves").get_by_text("steps", exact=True).click()
    assert path_of(page) == line
    page.get_by_label("Smoothing").fill("0.1")
    assert page.locator(FIRST_CHART).locator("path.raw").count() == 2
    assert path_of(page, 1) != line  # the smooth one, in front of the points themselves


def test_names_and_messages_cannot_act(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<img src=x onerror=alert(1)>", ended="failed")
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(
        recipe.replace("name: digits", f"name: '{EVIL}'").replace("val_accuracy", "val_x")
    )
    evil = json.dumps(EVIL)
    for name in ("metrics.jsonl", "events.jsonl", "workers.jsonl"):
        text = (folder / name).read_text()
        for whole in ('"vm"', '"ddp"', '"compute"', '"cpu"'):
            text = text.replace(whole, evil)
        for part in ("SIGKILL", "train_loss", "72%"):
            text = text.replace(part, f"train_{evil[1:-1]}")
        (folder / name).write_text(text)
    with (folder / "events.jsonl").open("a") as file:
        for event in ("warning", EVIL, "failed"):
            file.write(json.dumps({"time": 1_794_850_099.0, "event": event, "message": EVIL, "traceback": EVIL}) + "\n")
    (folder / "profile").mkdir()
    profile = {"rank": 0, "trace": f"x/{EVIL}", "operators": [{"name": EVIL, "calls": 1, "self_cpu_s": 1.0}]}
    (folder / "profile" / "rank-0.json").write_text(json.dumps(profile))
    other = make_run(tmp_path / "other")
    for page_file in (write_report(folder), write_comparison([folder, other], tmp_path / "both.html")):
        assert "<script>alert" not in page_file.read_text() and "<img" not in page_file.read_text()
        opened = browser.open(page_file)
        opened.page.locator(FIRST_CHART).hover()
        assert opened.page.locator("img").count() == 0 and opened.page.locator("script").count() == 2
        assert opened.page.get_by_text("onerror=alert(1)").count() > 0  # told, as the text that it is
        assert opened.is_quiet, (opened.complaints, opened.requests)


def test_the_page_refuses_scripts_and_requests_that_are_not_its_own(browser: Browser, page_file: Path) -> None:
    opened = browser.open(page_file)
    done = opened.page.evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.acted = true";
          document.body.append(script);
          const answer = await fetch("https://example.com/").then(() => "sent", () => "refused");
          return [Boolean(window.acted), answer];
        }"""
    )
    assert done == [False, "refused"] and opened.requests == []
    assert any("Content Security Policy" in words for words in opened.complaints)


@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_on_a_phone_nothing_is_wider_than_the_screen(
    browser: Browser, run_dir: Path, tmp_path: Path, kind: str
) -> None:
    other = make_run(
        tmp_path / "a-run-with-a-rather-long-name-that-has-no-place-to-break-at-all-20261116-bbbb", fails_at=None
    )
    target = tmp_path / "page.html"
    page_file = write_report(other, target) if kind == "run" else write_comparison([run_dir, other], target)
    opened = browser.open(page_file, width=360, height=740, has_touch=True, is_mobile=True)
    for details in opened.page.locator("summary").all():
        details.click()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 360
    assert opened.is_quiet, (opened.complaints, opened.requests)


def test_in_the_dark_the_page_is_dark_and_readable(browser: Browser, page_file: Path) -> None:
    """Contrast of text against what it stands on, as WCAG counts it: at least 4.5 for all texts."""
    for scheme in ("light", "dark"):
        page = browser.open(page_file, color_scheme=scheme).page
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        red = int(re.findall(r"\d+", ground)[0])
        assert red < 60 if scheme == "dark" else red > 200
        assert page.evaluate(CONTRAST) == []


CONTRAST = """() => {
  const channel = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return /^rgb\\(/.test(color) || !node.parentElement ? color : ground(node.parentElement);
  };
  const bad = [];
  for (const node of document.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,a,li > span,label span,button,.pill,small,b")) {
    if (!node.textContent.trim() || !node.offsetParent) continue;
    const [dim, bright] = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dim + 0.05);
    if (contrast < 4.5) bad.push(`${node.tagName}.${node.className} ${node.textContent.slice(0, 30)}: ${contrast}`);
  }
  return bad;
}"""


def test_printing_shows_all_sections_and_no_controls(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    page = browser.open(write_report(run_dir, tmp_path / "page.html"), color_scheme="dark").page
    pdf: bytes = page.pdf(format="A4", outline=True, tagged=True)
    titles = re.findall(rb"/Title \(([^)]*)\)", pdf)
    assert [title.decode() for title in titles if title.decode() in SECTIONS] == SECTIONS
    assert 2 <= len(re.findall(rb"/Type /Page\b(?!s)", pdf)) <= 8
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#recipe pre").is_visible() and not page.locator(".toolbar").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("#recipe details").get_attribute("open") is None


def test_runs_without_reports_or_of_early_versions_open(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(run_dir, tmp_path / "bare"))
    for name in ("metrics.jsonl", "workers.jsonl", "summary.json", "events.jsonl"):
        (bare / name).unlink()
    early = Path(shutil.copytree(run_dir, tmp_path / "early"))
    (early / "workers.jsonl").unlink()
    lines = [json.loads(line) for line in (early / "metrics.jsonl").read_text().splitlines()]
    (early / "metrics.jsonl").write_text("".join(json.dumps({**line, "time": None}) + "\n" for line in lines))
    for folder in (bare, early):
        opened = browser.open(write_report(folder))
        assert opened.page.locator("h1").inner_text() == folder.name
        assert opened.is_quiet, (opened.complaints, opened.requests)
    assert opened.page.locator("#curves input[value=time]").is_disabled()
    opened = browser.open(write_comparison([bare, early], tmp_path / "both.html"))
    assert opened.is_quiet, (opened.complaints, opened.requests)


def test_runs_side_by_side(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "digits-bbbb", fails_at=None, steps=300)
    recipe = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(recipe.replace("lr: 0.003", "lr: 0.01"))
    opened = browser.open(write_comparison([run_dir, other], tmp_path / "both.html"))
    page = opened.page
    assert page.locator("#recipe tbody tr").all_inner_texts() == ["optim.lr\t0.003\t0.01"]
    assert page.locator("#curves .chart").first.locator("path.line").count() == 2
    assert page.locator("#ledger .bar").count() == 2
    page.locator(FIRST_CHART).hover()
    assert {"digits-aaaa", "digits-bbbb"} <= set(page.locator(".tip >> nth=0").inner_text().split())
    whole = ticks(page)
    drag(page, 0.3, 0.5)
    assert ticks(page) != whole
    assert opened.is_quiet, (opened.complaints, opened.requests)
