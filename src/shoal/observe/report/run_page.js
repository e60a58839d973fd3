// The page of one run.

const marks = (data.restarts || []).map((at) => ({ ...at, words: `workers started again at step ${grouped(at.step, 0)}` }));

function head() {
  const verdict = data.verdict;
  return el("header", {},
    el("p", { class: "brand" }, "Shoal run"),
    el("div", { class: "title" }, el("h1", {}, data.name), pill(data.status)),
    el("p", { class: "facts" }, [...data.facts, "started " + clock(data.began)].join(" · ")),
    data.failed_because && el("div", { class: "verdict bad" }, el("p", { class: "verdict-label" }, "Why it failed"), el("p", { class: "verdict-words" }, sentence(data.failed_because))),
    el("div", { class: "verdict" },
      el("p", { class: "verdict-label" }, verdict && !verdict.is_final ? "Verdict so far" : "Verdict"),
      el("p", { class: "verdict-words" }, verdict ? sentence(verdict.words) : "Nothing to judge by yet: no report has come in."),
      verdict && verdict.advice && el("p", { class: "verdict-advice" }, sentence(verdict.advice) + "."),
      verdict && / of the time /.test(verdict.words) && el("p", { class: "note" }, "Of the time of the training loop: start-up and end are not in it.")));
}

const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

function figures() {
  const count = data.figures.length, columns = Math.ceil(count / Math.ceil(count / 7)); // rows of about the same length
  return el("dl", { class: "figures", "aria-label": "Key figures", style: { "--columns": String(columns) } }, data.figures.map((figure) =>
    el("div", {}, el("dt", {}, figure.label), el("dd", {}, written(figure.kind, figure.value, figure.label)), figure.note && el("dd", { class: "note" }, figure.note))));
}

function ledger() {
  const book = data.ledger;
  if (!book) return section("ledger", "Where the time went", null, el("p", { class: "empty" }, "No start of the workers is recorded yet."));
  const priced = book.price_per_hour !== null;
  const rows = book.rows.slice();
  if (book.unaccounted_s >= 0.0005 * book.worker_s) rows.push({ name: "none", label: "not accounted for", seconds: book.unaccounted_s, cost: book.unaccounted_cost });
  rows.push({ name: null, label: "all worker time", seconds: book.worker_s, cost: book.cost });
  const off = Math.abs(book.unaccounted_s) / book.worker_s;
  const sum = !book.has_times ? "The reports of this run carry no times, so what its steps took is not known."
    : off < 0.0005 ? "Shares are of all worker time: wall time times workers, to which the rows add up."
      : book.unaccounted_s > 0 ? `Shares are of all worker time: wall time times workers. Nothing tells what ${share(off)} of it went to.`
        : `Shares are of all worker time: wall time times workers. The rows add up to ${share(off)} more than that, where what two of them tell overlaps.`;
  return section("ledger", "Where the time went", sum,
    bar("Worker time", ledgerParts(book), Math.max(book.worker_s, 1e-9)),
    table("Goodput ledger", [
      { label: "Spent on", of: (row) => [row.name && swatch(row.name === "none" ? "var(--ledger-none)" : ledgerColor(row.name)), row.label] },
      { label: "Of all worker time", number: true, of: (row) => share(row.seconds / book.worker_s) },
      { label: "Worker time", number: true, of: (row) => duration(row.seconds) },
      ...(book.worker_s >= 3600 ? [{ label: "Worker-hours", number: true, class: "roomy", of: (row) => hours(row.seconds) }] : []),
      ...(priced ? [{ label: "Cost", number: true, of: (row) => money(row.cost) }] : []),
    ], rows, (row) => (row.name ? null : "total")),
    priced && el("p", { class: "note" }, `A worker costs ${plain(book.price_per_hour)} an hour (cluster.price_per_hour).`));
}

function curveHead(series) {
  return el("p", { class: "values" }, series.map((one) => el("span", {}, series.length > 1 && [swatch(one.color), one.label + " "],
    el("b", {}, metric(one.name, one.last)),
    one.best !== null && one.best !== one.last && el("small", {}, ` best ${metric(one.name, one.best)} at step ${grouped(one.best_step, 0)}`))));
}

function curves() {
  if (!data.charts.length) return section("curves", "Curves", null, el("p", { class: "empty" }, "No metrics yet: the first report comes after observe.every_steps steps."));
  const group = makeGroup();
  group.smooth = firstSmoothing(data.charts);
  const hasTimes = data.charts.some((chart) => chart.series.some((one) => one.time));
  const charts = data.charts.map(({ title, series }) => {
    const colored = series.map((one) => ({ ...one, color: one.label === "val" ? "var(--val)" : "var(--train)" }));
    const broken = series.reduce((sum, one) => sum + one.broken, 0), first = series[0];
    return { title: title.replaceAll("_", " "), head: curveHead(colored), marks, exact: isExact(first.name), most: most(first.name), format: (v) => metric(first.name, v),
      series: colored.map((one) => ({ ...one, name: one.label })),
      label: `${title}: ` + series.map((one) => `${one.label} ends at ${metric(one.name, one.last)}`).join(", "),
      note: broken ? `${grouped(broken, 0)} ${broken === 1 ? "report was" : "reports were"} not a number, and ${broken === 1 ? "is" : "are"} left out.` : null };
  });
  return section("curves", "Curves", null, how(), toolbar(group, { hasTimes, log: true, smooth: true }), chartGrid(charts, group, 8),
    marks.length > 0 && el("p", { class: "note" }, "Dashed lines: the workers were started again."));
}

function steps() {
  const totals = Object.entries(data.totals);
  if (!totals.length) return null;
  const sum = (rows) => rows.reduce((all, [, seconds]) => all + seconds, 0), group = makeGroup(), over = data.phases;
  const series = over && Object.entries(over.seconds).map(([phase, value]) => ({ phase, name: PHASES[phase] || phase, color: phaseColor(phase), step: over.step, time: over.time, value }));
  // Of a step: what belongs to every one. Of all: with what comes but now and then, or once.
  const ofSteps = totals.filter(([phase]) => series && series.some((one) => one.phase === phase)), stepping = sum(ofSteps), all = sum(totals);
  return section("steps", "Where a step's time goes", "The mean over the workers.",
    series && [toolbar(group, { hasTimes: Boolean(over.time) }),
      el("figure", { class: "card wide" }, el("figcaption", {}, el("h3", {}, "Seconds of a step"), el("p", { class: "note" }, "Shares are of a step.")), makeChart({ label: "Seconds of a step by phase", series, stacked: true, height: 240, marks, format: duration }, group).host,
        legend(ofSteps.map(([phase, value]) => [PHASES[phase] || phase, phaseColor(phase), share(value / stepping)])))],
    el("h3", {}, "All that reports tell of"),
    bar("Seconds by phase", totals.map(([phase, value]) => ({ label: PHASES[phase] || phase, value, color: phaseColor(phase) })), all),
    el("p", { class: "note" }, `Shares are of these ${duration(all)}, the mean of a worker. What it took to start it is in the table above.`),
    legend(totals.map(([phase, value]) => [PHASES[phase] || phase, phaseColor(phase), `${duration(value)} · ${share(value / all)}`])));
}

function story() {
  const { events, stretches, left_out: leftOut } = data.story;
  if (!events.length) return null;
  const many = events.length > 12, few = events.filter((event) => event.tone !== "save");
  const rows = (some, kind) => el("ol", { class: "events" + kind }, some.map((event) => el("li", { class: event.tone },
    el("span", { class: "when", title: clock(data.began + event.time) }, "+" + duration(Math.max(event.time, 0))), el("span", { class: "kind" }, event.kind.replaceAll("_", " ")),
    el("span", { class: "what" }, event.words, event.detail && details("stack", el("pre", {}, event.detail))))));
  const shown = many ? few.slice(-40) : events;
  return section("story", "What happened", null, timeline(events, stretches), rows(shown, shown.length < events.length ? " short" : ""),
    shown.length < events.length && details(`all ${grouped(events.length, 0)} events`, rows(events, "")),
    leftOut > 0 && el("p", { class: "note" }, `${grouped(leftOut, 0)} more are in events.jsonl.`));
}

const DOING = { starting: ["starting", "var(--ledger-startup)"], training: ["training", "var(--ledger-useful)"], restarting: ["starting again", "var(--ledger-restart)"] };

function timeline(events, stretches) {
  const end = Math.max(1e-3, ...events.map((event) => event.time), ...stretches.map((one) => one.to));
  const left = (time) => (100 * Math.min(Math.max(time, 0) / end, 1)).toFixed(3) + "%";
  const marked = events.filter((event) => ["bad", "warn", "good", "save"].includes(event.tone) || ["restart", "resize"].includes(event.kind));
  const used = [...new Set(stretches.map((one) => one.doing))];
  const ticks = timeTicks(0, end, 5).filter((t) => t <= end * 0.85);
  const words = stretches.map((one) => `${DOING[one.doing][0]} from ${duration(one.from)} to ${duration(one.to)}`).join("; ");
  return el("div", { class: "timeline" },
    el("div", { class: "marks", "aria-hidden": "true" }, marked.map((event) => el("span", { class: "at " + event.tone, title: `+${duration(event.time)} ${event.words}`, style: { left: left(event.time) } }))),
    el("div", { class: "track", role: "img", "aria-label": words || "nothing has run yet" }, stretches.map((one) => el("span", { title: `${DOING[one.doing][0]}: ${duration(one.to - one.from)}`,
      style: { left: left(one.from), width: (100 * (one.to - one.from) / end).toFixed(3) + "%", background: DOING[one.doing][1] } }))),
    el("div", { class: "times", "aria-hidden": "true" }, ticks.map((t) => el("span", { style: { left: left(t) } }, duration(t))), el("span", { class: "last", style: { left: "100%" } }, duration(end))),
    legend([...used.map((name) => DOING[name]), ...[["failure", "bad"], ["warning", "warn"], ["save", "save"]].filter(([, tone]) => marked.some((event) => event.tone === tone)).map(([label, tone]) => [label, `var(--${tone})`])]));
}
