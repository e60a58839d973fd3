// Several runs side by side.

const color = (place) => `var(--series-${place % 8})`;
const dash = (place) => [null, "6 3", "2 3", "8 3 2 3"][Math.floor(place / 8) % 4];
const runLabel = (place) => [swatch(color(place)), data.runs[place].label];

function head() {
  return el("header", {}, el("p", { class: "brand" }, "Shoal runs"),
    el("div", { class: "title" }, el("h1", {}, `${data.runs.length} runs side by side`)),
    el("ul", { class: "runs" }, data.runs.map((run, i) => el("li", {}, el("div", {}, swatch(color(i)), el("b", {}, run.label), pill(run.status)),
      el("p", {}, run.failed_because || (run.verdict ? run.verdict.words : "no verdict yet"))))));
}

const differs = (row) => row.values.some((value) => value !== row.values[0]);

function sideBySide(label, rows) {
  return table(label, [{ label: "", of: (row) => row.label, class: "label" },
    ...data.runs.map((_, i) => ({ label: runLabel(i), number: true, class: "run-value", of: (row) => {
      const text = written(row.kind, row.values[i] ?? null, row.label);
      return row.best.includes(i) ? el("b", { class: "best", title: "the best of them" }, text) : text;
    } }))], rows, (row) => [differs(row) ? "" : "same", ["text", "code"].includes(row.kind) ? "words" : ""].join(" ").trim() || null);
}

function outcome() {
  return section("outcome", "How they went", "The best of a row is bold; what is the same in all is grey.", sideBySide("Outcome", [...data.outcome, ...data.metrics]));
}

function recipes() {
  return section("recipe", "What differs in their recipes", null,
    data.recipe.length ? sideBySide("Recipe fields that differ", data.recipe) : el("p", { class: "empty" }, "Nothing: the recipes are the same."));
}

function ledgers() {
  const known = data.runs.map((run, i) => [run, data.ledgers[i], i]).filter(([, book]) => book);
  if (!known.length) return null;
  const seen = new Map(known.flatMap(([, book]) => ledgerParts(book)).map((part) => [part.label, part.color]));
  return section("ledger", "Where the time went", "Each bar is all worker time of a run.",
    el("div", { class: "bars" }, known.map(([run, book, i]) => el("div", {}, el("p", {}, runLabel(i)), bar(run.label, ledgerParts(book), Math.max(book.worker_s, 1e-9))))),
    legend([...seen]), sideBySide("Shares of worker time", data.shares));
}

function curves() {
  if (!data.charts.length) return null;
  const group = makeGroup(), hasTimes = data.charts.some((chart) => chart.series.some((one) => one.time));
  group.smooth = firstSmoothing(data.charts);
  const charts = data.charts.map(({ title, series }) => ({ title: title.replaceAll("_", " "), exact: isExact(title), most: most(title), format: (v) => metric(title, v),
    label: `${title}: ` + series.map((one) => `${data.runs[one.run].label} ends at ${metric(title, one.last)}`).join(", "),
    series: series.map((one) => ({ ...one, name: data.runs[one.run].label, color: color(one.run), dash: dash(one.run) })) }));
  return section("curves", "Curves", null, how(), toolbar(group, { hasTimes, log: true, smooth: true }), legend(data.runs.map((run, i) => [run.label, color(i)])), chartGrid(charts, group, 8));
}

const parts = [outcome(), recipes(), ledgers(), curves()].filter(Boolean);
show(data.runs.map((run) => run.label).join(" · "), head(), contents(parts), ...parts, footer(""));
