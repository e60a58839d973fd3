// The page of one search.

const STATES = { done: "good", failed: "bad", running: "live" };
function state(status) {
  return el("span", { class: "state " + (STATES[status] || "quiet") }, status);
}

const many = (count, what) => `${grouped(count, 0)} ${what}${count === 1 ? "" : "s"}`;
const count = (value) => plain(Number(value.toPrecision(3)));
const best = data.best && byNumber.get(data.best.trial);
const several = data.objectives.length > 1;
const names = data.objectives.map((one) => clip(one.metric, 80));

function bestWords() {
  if (!best) return `No trial has reported ${names[0]}${data.status === "running" ? " yet" : ""}.`;
  const value = `${names[0]} ${metric(goal.metric, data.best.value)}`;
  if (several) return `${data.front.length} of ${many(trials.length, "trial")} ${data.front.length === 1 ? "is" : "are"} on the Pareto front of ${names.join(" and ")}. Trial ${best.trial} has the best ${value}.`;
  return `${value} by trial ${best.trial}` + (best.best_at === null ? "." : `, at ${plain(best.best_at)} of ${plain(data.length)} ${data.unit}.`);
}

// How the search went, in a sentence or three.
function story() {
  const figures = data.figures, counted = Object.entries(data.counts).map(([status, count]) => `${grouped(count, 0)} ${status}`).join(", ");
  const under = data.scheduler === "none" ? "" : ` under ${data.scheduler}`, time = figures.wall_s === null ? "" : ` in ${duration(figures.wall_s)}`;
  const all = trials.length < data.num_trials ? `${grouped(trials.length, 0)} of ${many(data.num_trials, "trial")}` : many(trials.length, "trial");
  const saves = data.counts.stopped && figures.saved > 0 && `It trained ${count(figures.trained)} of the ${count(figures.trained_if_all_to_the_end)} ${data.unit} that running all to the end takes: ${share(figures.saved)} saved.`;
  const took = figures.exploits > 0 && `${many(figures.exploits, "time")} a trial took over the weights of a better one.`;
  return [`${data.search === "optuna" ? "Optuna" : data.search === "grid" ? "A grid search" : "A random search"}${under} made ${all}${time}${counted ? ": " + counted : ""}.`, saves, took].filter(Boolean).join(" ");
}

function head() {
  return el("header", {}, el("p", { class: "brand" }, "Shoal search"),
    el("div", { class: "title" }, el("h1", {}, data.name), pill(data.status)),
    el("p", { class: "facts" }, [...data.objectives.map((one) => `${clip(one.metric, 80)}, ${one.less_is_better ? "less" : "more"} is better`), many(data.settings.length, "setting"), `up to ${plain(data.length)} ${data.unit} a trial`].join(" · ")),
    data.error && el("div", { class: "verdict bad" }, el("p", { class: "verdict-label" }, "Why it ended early"), el("p", { class: "verdict-words" }, data.error)),
    el("div", { class: "verdict" }, el("p", { class: "verdict-label" }, data.status === "running" ? "Best so far" : "Best"),
      el("p", { class: "verdict-words" }, bestWords()), el("p", { class: "verdict-advice" }, story())));
}

function figures() {
  const { wall_s: wall, busy_s: busy, saved, trained, exploits, first_step_s: first } = data.figures;
  const cells = [
    best && [`Best ${names[0]}`, metric(goal.metric, data.best.value), `trial ${best.trial}`],
    ["Trials", grouped(trials.length, 0), Object.entries(data.counts).map(([status, count]) => `${grouped(count, 0)} ${status}`).join(", ")],
    trained !== null && ["Trained", count(trained), data.unit],
    data.counts.stopped && saved > 0 && ["Saved", share(saved), `of ${count(data.figures.trained_if_all_to_the_end)} ${data.unit}`],
    exploits > 0 && ["Taken over", grouped(exploits, 0), "weights of better trials"],
    wall !== null && ["Wall time", duration(wall)],
    busy > 0 && ["Time of trials", duration(busy), wall > 0 ? `${Number((busy / wall).toPrecision(2))} at a time` : null],
    first && ["To first step", duration(first.median), `median, at most ${duration(first.longest)}`],
  ].filter(Boolean);
  return el("dl", { class: "figures", "aria-label": "Key figures", style: { "--columns": String(Math.min(cells.length, 7)) } },
    cells.map(([label, value, note]) => el("div", {}, el("dt", {}, label), el("dd", {}, value), note && el("dd", { class: "note" }, note))));
}

function copied(text) {
  const button = el("button", { type: "button", onclick: () => {
    const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    const box = el("textarea", { class: "offscreen", "aria-hidden": "true" });
    document.body.append(box);
    box.value = text;
    box.select();
    if (document.execCommand("copy")) done(); // the way that a page opened from a file has too
    box.remove();
    button.focus();
  } }, "Copy");
  return button;
}

const exact = (value) => (typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value));

function bestSettings() {
  if (!best) return section("best", "Best settings", null, el("p", { class: "empty" }, `None yet: no trial has reported ${names[0]}.`));
  const rows = data.settings.filter((one) => one.key in best.config);
  return section("best", "Best settings", several ? `Of trial ${best.trial}, the best in ${names[0]}.` : `Of trial ${best.trial}, beside what the space allows.`,
    table("Best settings", [
      { label: "Field", class: "code", of: (row) => row.key },
      { label: "Best", class: "code", of: (row) => el("b", { title: String(best.config[row.key]) }, clip(exact(best.config[row.key]), 300)) },
      { label: "Space", class: "code range", of: (row) => [clip(row.words, 300), row.when && el("small", {}, " " + clip(row.when, 200))] },
    ], rows),
    el("div", { class: "commands" }, data.commands.map(({ what, text }) => el("div", {}, el("p", { class: "note" }, what), el("div", { class: "command" }, el("pre", { tabindex: "0" }, text), copied(text))))));
}

const card = ({ host, read }, ...before) => el("figure", { class: "card" }, ...before, el("div", { class: "wide-scroll" }, host), read);

function across() {
  const title = "Settings and results";
  if (!trials.length) return section("settings", title, null, el("p", { class: "empty" }, "No trial has been proposed yet."));
  const grey = trials.some(isGrey), cut = data.objectives.filter((one) => one.axis && one.axis.cut);
  return section("settings", title, "A line is a trial" + (data.settings.length > 1 && data.settings[0].importance !== null ? "; what matters most is on the left." : "."),
    card(parallel(), el("figcaption", {}, goal.axis && scaleBar("colors from the worst to the best"), grey && el("p", { class: "note" }, "Dashed grey: failed, or without a value."))),
    cut.length > 0 && el("p", { class: "note" }, `Values of ${cut.map((one) => clip(one.metric, 80)).join(" and ")} that are far worse than most are drawn at the end of the axis.`));
}

function importance() {
  const known = data.settings.filter((one) => one.importance !== null), title = "Which settings matter";
  if (data.too_few !== null || !known.length) return section("importance", title, null, el("p", { class: "empty" }, data.too_few || "Nothing to tell."));
  const top = Math.max(1e-9, ...known.map((one) => one.importance));
  return section("importance", title, `How much of what the trials' ${names[0]} differs in goes back to each setting, by a forest of trees over them.`,
    el("ul", { class: "shares" }, known.map((one) => el("li", {}, el("span", { class: "code", title: one.key }, one.key),
      el("span", { class: "share-track", "aria-hidden": "true" }, el("span", { style: { width: `${(100 * one.importance / top).toFixed(2)}%` } })), el("b", {}, share(one.importance))))));
}

function curves() {
  const known = data.objectives.map((one, i) => [one, i]).filter(([one]) => one.curve_axis);
  const title = "Curves";
  if (!known.length) return section("curves", title, null, el("p", { class: "empty" }, "No values over time: no trial has reported any."));
  const statuses = new Set(trials.map((trial) => trial.status)), marks = [statuses.has("stopped") && "a ring where a trial was stopped", statuses.has("failed") && "a cross where it failed"].filter(Boolean);
  return section("curves", title, `The best trial is bold${marks.length ? "; " + marks.join(", ") : ""}.` + (data.is_population ? " A jump is where a trial took over the weights of another." : ""),
    el("div", { class: known.length > 1 ? "grid" : "" }, known.map(([one, i]) => card(curvesOf(one, i), el("figcaption", {}, el("h3", {}, clip(one.metric, 120)), i === 0 && goal.axis && scaleBar("colors from the worst to the best"))))));
}

function tradeOffs() {
  if (!several) return null;
  const front = data.front.map((number) => byNumber.get(number)).filter(Boolean);
  const drawn = data.objectives.map((_, i) => i).slice(1).filter((i) => goal.axis && data.objectives[i].axis);
  return section("front", "Trade-offs", "By the values of each trial where the first metric is best. Trials that none is better than in everything are ringed: the Pareto front.",
    drawn.length ? el("div", { class: drawn.length > 1 ? "grid" : "" }, drawn.map((i) => card(scatter(0, i), el("figcaption", {}, el("h3", {}, clip(data.objectives[i].metric, 120)), el("p", { class: "note" }, data.objectives[i].less_is_better ? "less is better" : "more is better")))))
      : el("p", { class: "empty" }, "No trial has reported all of them."),
    front.length > 0 && table("Pareto front", [
      { label: "Trial", of: trialButton }, ...data.objectives.map((one, i) => ({ label: clip(one.metric, 60), number: true, of: (trial) => metric(one.metric, trial.values[i]) })), ...settingColumns(),
    ], front));
}

function lineage() {
  if (!data.is_population || !trials.length) return null;
  const moves = trials.flatMap((trial) => trial.lane.filter((part) => part.donor !== null).map((part) => ({ trial, ...part }))).sort((a, b) => a.from - b.from || a.trial.trial - b.trial.trial);
  return section("lineage", "Lineage", "A lane is a trial, its color how good it was there. An arrow goes from a trial to one that took over its weights.",
    card(lanes(), goal.curve_axis && el("figcaption", {}, scaleBar("colors from the worst to the best"))),
    moves.length ? details(many(moves.length, "take-over"), table("Take-overs", [
      { label: "At " + data.unit, number: true, of: (move) => plain(move.from) }, { label: "Trial", number: true, of: (move) => move.trial.trial }, { label: "Took over", number: true, of: (move) => "trial " + move.donor },
      { label: "And goes on with", class: "code", of: (move) => pairs(move.config) }], moves)) : el("p", { class: "note" }, "No trial has taken over the weights of another."));
}

function trialButton(trial) {
  const button = el("button", { type: "button", class: "pick", "aria-pressed": "false", "data-trial": trial.trial, title: "Show it in the pictures" }, trial.trial);
  return [button, trial.page && [" ", el("a", { href: trial.page, "aria-label": `Report of trial ${trial.trial}` }, "report")]];
}

function settingColumns() {
  if (data.settings.length > 8) return [{ label: "Settings", class: "code", of: (trial) => pairs(trial.config) }];
  const short = (key) => key.slice(key.lastIndexOf(".") + 1), isOwn = (key) => data.settings.filter((one) => short(one.key) === short(key)).length === 1;
  return data.settings.map((one) => ({ label: isOwn(one.key) ? short(one.key) : one.key, title: one.key, number: !one.options || one.options.every((value) => typeof value === "number"), class: "setting",
    of: (trial) => el("span", { title: String(trial.config[one.key] ?? "not set") }, clip(settingText(trial.config[one.key]), 60)) }));
}

function allTrials() {
  if (!trials.length) return section("trials", "All trials", null, el("p", { class: "empty" }, "There are none yet."));
  const hasReason = trials.some((trial) => trial.reason);
  const columns = [{ label: "Trial", of: trialButton, class: "pick-cell" }, { label: "Status", of: (trial) => state(trial.status) },
    ...data.objectives.map((one, i) => ({ label: clip(one.metric, 60), number: true, of: (trial) => { const text = metric(one.metric, trial.values[i]); return !i && isBest(trial) ? el("b", { class: "best" }, text) : text; } })),
    { label: capital(data.unit), number: true, of: (trial) => plain(trial.progress) }, ...settingColumns(), { label: "Busy", number: true, of: (trial) => duration(trial.busy_s) },
    ...(hasReason ? [{ label: "Why it ended", class: "reason", of: (trial) => el("span", { title: trial.reason }, clip(trial.reason, 240)) }] : [])];
  const place = el("div", { class: "all-trials" });
  const fillWith = (rows) => { place.replaceChildren(table("All trials", columns, rows)); markRows(); };
  fillWith(ranked);
  place.addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr"), button = row && !event.target.closest("a") && row.querySelector("button.pick");
    if (button) pick(Number(button.dataset.trial));
  });
  return section("trials", "All trials", "Choose one to see it in the pictures.", el("div", { class: "toolbar" }, choice("Order", [["best", "best first"], ["trial", "by number"]], "best", (by) => fillWith(by === "best" ? ranked : trials))), place);
}

const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);
const pick = (number) => choose(looked.chosen === number ? null : number);

function markRows() {
  document.querySelectorAll("button.pick").forEach((button) => {
    const isChosen = Number(button.dataset.trial) === looked.chosen;
    button.setAttribute("aria-pressed", String(isChosen));
    button.closest("tr").classList.toggle("chosen", isChosen);
  });
}

watchers.push(markRows);
const parts = [bestSettings(), tradeOffs(), across(), importance(), curves(), lineage(), allTrials()].filter(Boolean);
show(`${data.name} · ${data.status}`, head(), figures(), contents(parts), ...parts, footer(`${data.search_dir}.`));
document.querySelectorAll("#front button.pick").forEach((button) => button.addEventListener("click", () => pick(Number(button.dataset.trial))));
