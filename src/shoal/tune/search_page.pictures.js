// Pictures of a search: lines across axes, curves, points and lanes. Whichever is pointed at, all show the same trial.

const trials = data.trials, byNumber = new Map(trials.map((trial) => [trial.trial, trial])), goal = data.objectives[0];
const loss = (objective, value) => (value === null ? Infinity : objective.less_is_better ? value : -value);
const ranked = trials.slice().sort((a, b) => loss(goal, a.values[0]) - loss(goal, b.values[0]) || a.trial - b.trial);
const worstFirst = ranked.slice().reverse();
const clip = (text, most) => (text.length > most ? text.slice(0, Math.max(most - 1, 1)) + "…" : text);
const settingText = (value) => (typeof value === "number" ? plain(value) : String(value ?? MISSING));
const bounded = (value, low, high) => Math.min(Math.max(value, low), high);

// Where a value lies on an axis, from 0 to 1. What is beyond an axis that was cut lies at its end, or as far out as that.
function placeOn(axis, value, out = 0) {
  const f = axis.log ? Math.log : (v) => v, wide = f(axis.high) - f(axis.low);
  return wide > 0 ? bounded((f(Math.max(value, axis.log ? 1e-300 : -Infinity)) - f(axis.low)) / wide, -out, 1 + out) : 0.5;
}

function axisTicks(axis, count) {
  const ticks = axis.log ? logTicks(axis.low, axis.high) : niceTicks(axis.low, axis.high, count);
  return axis.whole ? ticks.filter(Number.isInteger) : ticks;
}

// A color for how good a value is, 1 the best. The scale stands in the style, one for light and one for dark.
function shade(good) {
  const at = bounded(good, 0, 1) * 4, step = Math.min(Math.floor(at), 3);
  return `color-mix(in oklab, var(--scale-${step + 1}) ${Math.round((at - step) * 100)}%, var(--scale-${step}))`;
}

// How good a value is among others: the share of them that are worse, those that are as good counted half.
function ranking(objective, values) {
  const known = values.filter((value) => value !== null).map((value) => loss(objective, value)).sort((a, b) => a - b), last = known.length - 1;
  const before = (isLess) => { let [low, high] = [0, known.length]; while (low < high) { const at = (low + high) >> 1; if (isLess(known[at])) low = at + 1; else high = at; } return low; };
  return (value) => { const own = loss(objective, value), first = before((one) => one < own), end = before((one) => one <= own) - 1; return last > 0 ? 1 - (first + Math.max(end, first)) / 2 / last : 1; };
}

const goodness = ranking(goal, trials.map((trial) => trial.values[0]));
const isGrey = (trial) => trial.status === "failed" || trial.values[0] === null;
const colorOf = (trial) => (isGrey(trial) ? "var(--grey)" : shade(goodness(trial.values[0])));
const lineClass = (trial) => "of-trial" + (isGrey(trial) ? " without" : "") + (trials.length > 80 ? " many" : "");
const isBest = (trial) => data.best !== null && trial.trial === data.best.trial;

// Which trial is looked at: the one under the pointer, else the one that was chosen.
const watchers = [], looked = { pointed: null, chosen: null };
const shown = () => looked.pointed ?? looked.chosen;
function look(change) {
  const before = shown();
  Object.assign(looked, change);
  if (before !== shown() || "chosen" in change) watchers.forEach((call) => call(shown()));
}
const choose = (number) => look({ pointed: null, chosen: number });

const pairs = (config) => el("ul", { class: "inline" }, Object.entries(config).map(([key, value]) =>
  el("li", {}, el("span", {}, key), " ", el("b", { title: String(value) }, clip(settingText(value), 60)))));

function trialWords(trial) {
  return [el("p", { class: "who" }, el("b", {}, "Trial " + trial.trial), state(trial.status),
    data.objectives.map((one, i) => el("span", {}, clip(one.metric, 60) + " ", el("b", {}, metric(one.metric, trial.values[i])))),
    el("span", {}, `${plain(trial.progress)} of ${plain(data.length)} ${data.unit}`)), pairs(trial.config)];
}

// paint: width -> {node, find: (x, y) -> trial or null, over: trial -> nodes}; words: (trial, painted) -> what is told of it.
function picture(label, hint, paint, words = trialWords) {
  const host = el("div", { class: "chart picture", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": label });
  const read = el("div", { class: "readout" });
  let painted = null;
  const tell = () => {
    const trial = byNumber.get(shown()) || null;
    painted.node.classList.toggle("one", trial !== null);
    painted.node.querySelector(".over").replaceChildren(...(trial ? painted.over(trial).flat().filter(Boolean) : []));
    read.replaceChildren(...(trial ? words(trial, painted) : [el("p", { class: "note" }, hint)]).flat());
  };
  const found = (event) => {
    const box = painted.node.getBoundingClientRect(), scale = painted.node.viewBox.baseVal.width / box.width;
    const trial = painted.find((event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
    return trial ? trial.trial : null;
  };
  const draw = (forced) => {
    const next = paint(forced || host.clientWidth || 600);
    next.node.append(svg("g", { class: "over" }));
    host.replaceChildren(next.node);
    painted = next;
    tell();
  };
  host.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "mouse") return;
    const one = found(event);
    if (one === looked.pointed) tell(); else look({ pointed: one });
  });
  host.addEventListener("pointerleave", () => look({ pointed: null }));
  host.addEventListener("click", (event) => { const one = found(event); choose(one === looked.chosen ? null : one); });
  host.addEventListener("focus", () => {
    read.setAttribute("aria-live", "polite");
    if (host.matches(":focus-visible") && shown() === null && ranked.length) choose(ranked[0].trial);
  });
  host.addEventListener("blur", () => read.removeAttribute("aria-live"));
  host.addEventListener("keydown", (event) => {
    const at = ranked.findIndex((trial) => trial.trial === looked.chosen), go = (to) => choose(ranked[bounded(to, 0, ranked.length - 1)].trial);
    const act = { ArrowUp: () => go(at - 1), ArrowLeft: () => go(at - 1), ArrowDown: () => go(at + 1), ArrowRight: () => go(at + 1),
      Home: () => go(0), End: () => go(ranked.length - 1), Escape: () => choose(null) }[event.key];
    if (act && ranked.length) { event.preventDefault(); act(); }
  });
  watchers.push(() => painted && tell());
  allCharts.push({ host, draw });
  return { host, read };
}

// On an axis, without the zeros that a column of values would keep.
const onAxis = (name) => (value) => metric(name, value).replace(/(\.\d*?)0+(?= |%|$)/, "$1").replace(/\.(?= |%|$)/, "");
const POINTING = "Point at a line or click it; by keyboard: arrows from the best trial to the worst, Escape.";
const scaleBar = (label) => el("p", { class: "scale" }, el("span", {}, "worst"), el("span", { class: "ramp", role: "img", "aria-label": label }), el("span", {}, "best " + clip(goal.metric, 40)));

// One axis a setting, the objectives last; one line a trial.
function parallel() {
  const axes = [...data.settings.map((one) => ({ ...one, name: one.key.slice(one.key.lastIndexOf(".") + 1), above: one.key.slice(0, one.key.lastIndexOf(".") + 1) })),
    ...data.objectives.map((one) => ({ ...one.axis, isGoal: true, key: one.metric, name: one.metric, above: (one.less_is_better ? "less" : "more") + " is better", none: !one.axis }))];
  const place = (trial, i) => (i < data.settings.length ? trial.places[i]
    : axes[i].none || trial.values[i - data.settings.length] === null ? null : placeOn(axes[i], trial.values[i - data.settings.length]));
  const hasGaps = trials.some((trial) => axes.some((_, i) => place(trial, i) === null));
  const ends = bounded(axes[axes.length - 1].name.length * 8.4, 118, 170), narrowest = 100;
  function paint(width) {
    const height = hasGaps ? 372 : 340, top = 48, bottom = hasGaps ? height - 44 : height - 14, left = 10, below = height - 14;
    const gap = (width - left - ends) / Math.max(axes.length - 1, 1), X = (i) => left + i * gap;
    const Y = (at) => (at === null ? below : bottom - at * (bottom - top));
    const lanes = new Map(trials.map((trial) => [trial.trial, axes.map((_, i) => Y(place(trial, i)))]));
    const line = (trial) => lanes.get(trial.trial).map((y, i, ys) => (i ? `C${(X(i) - gap / 2).toFixed(1)} ${ys[i - 1].toFixed(1)} ${(X(i) - gap / 2).toFixed(1)} ${y.toFixed(1)} ` : "M") + `${X(i).toFixed(1)} ${y.toFixed(1)}`).join("");
    const room = (i) => Math.floor(((i < axes.length - 1 ? gap : ends) - 10) / 7.5);
    const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      worstFirst.map((trial) => svg("path", { class: lineClass(trial) + (isBest(trial) ? " best-line" : ""), d: line(trial), style: { stroke: colorOf(trial) } })),
      axes.map((axis, i) => svg("g", { class: "an-axis" }, svg("line", { x1: X(i), x2: X(i), y1: top, y2: bottom }),
        svg("text", { class: "tick", x: X(i) - 5, y: 16 }, clip(axis.above, room(i) + 2)),
        svg("text", { class: "axis-name", x: X(i) - 5, y: 31 }, clip(axis.name, room(i)), svg("title", {}, axis.key)),
        ticksOf(axis).map(([at, words]) => [svg("line", { x1: X(i) - 3, x2: X(i) + 3, y1: Y(at), y2: Y(at) }), svg("text", { class: "tick halo", x: X(i) + 7, y: Y(at) + 3.5 }, clip(words, room(i) - 1), svg("title", {}, words))]),
        hasGaps && trials.some((trial) => place(trial, i) === null) && [svg("circle", { class: "gap", cx: X(i), cy: below, r: 3 }), svg("text", { class: "tick halo", x: X(i) + 7, y: below + 3.5 }, axis.isGoal ? "none" : "not set")])));
    return { node, over: (trial) => [svg("path", { class: "chosen-line", d: line(trial), style: { stroke: colorOf(trial) } }), lanes.get(trial.trial).map((y, i) => svg("circle", { class: "spot", cx: X(i), cy: y, r: 4, style: { fill: colorOf(trial) } }))],
      find: (x, y) => {
        const i = bounded(Math.floor((x - left) / gap), 0, Math.max(axes.length - 2, 0)), t = alongCurve(bounded((x - left) / gap - i, 0, 1)), rise = t * t * (3 - 2 * t);
        return closest((trial) => { const ys = lanes.get(trial.trial); return Math.abs(ys[i] + ((ys[i + 1] ?? ys[i]) - ys[i]) * rise - y); }, 16);
      } };
  }
  const made = picture("Settings and results of all trials, a line each", POINTING, paint);
  made.host.style.setProperty("min-width", `${10 + ends + narrowest * (axes.length - 1)}px`);
  return made;
}

function ticksOf(axis) {
  if (axis.none) return [];
  if (axis.options) {
    const every = Math.ceil(axis.options.length / 12), last = Math.max(axis.options.length - 1, 1);
    return axis.options.map((value, i) => [axis.options.length > 1 ? i / last : 0.5, settingText(value)]).filter((_, i) => i % every === 0);
  }
  if (!(axis.high > axis.low)) return [[0.5, axis.isGoal ? onAxis(axis.key)(axis.low) : plain(axis.low)]];
  return axisTicks(axis, 5).map((value) => [placeOn(axis, value), axis.isGoal ? onAxis(axis.key)(value) : plain(value)]);
}

// The line between two axes is a curve that is level at both: the t at which it is at x, by halving.
function alongCurve(x) {
  let [low, high] = [0, 1];
  for (let i = 0; i < 20; i++) { const t = (low + high) / 2; if (1.5 * t - 1.5 * t * t + t * t * t < x) low = t; else high = t; }
  return (low + high) / 2;
}

function closest(distance, most) {
  let [best, near] = [null, most];
  for (const trial of ranked) { const own = distance(trial); if (own < near) [best, near] = [trial, own]; }
  return best;
}

// Rules, ticks and the two scales of a picture with x and y.
function plane(width, height, x, y, bottomLabel) {
  const room = (axis) => (axis.high > axis.low ? axis : { ...axis, low: axis.log ? axis.low / 1.5 : axis.low - 0.5, high: axis.log ? axis.high * 1.5 : axis.high + 0.5 });
  [x, y] = [room(x), room(y)];
  const yTicks = axisTicks(y, 6), left = 14 + 6.4 * Math.max(3, ...yTicks.map((t) => y.words(t).length)), right = width - 14, top = 12, bottom = height - 38;
  const X = (value) => left + 6 + placeOn(x, value) * (right - left - 12), Y = (value, out = 0) => bottom - 6 - placeOn(y, value, out) * (bottom - top - 12);
  return { X, Y, left, right, top, bottom, lines: [
    yTicks.map((t) => [svg("line", { class: "rule", x1: left, x2: right, y1: Y(t), y2: Y(t) }), svg("text", { class: "tick", x: left - 6, y: Y(t) + 3.5, "text-anchor": "end" }, y.words(t))]),
    axisTicks(x, Math.max(2, Math.floor((right - left) / 90))).map((t) => svg("text", { class: "tick", x: X(t), y: bottom + 16, "text-anchor": X(t) > right - 20 ? "end" : "middle" }, x.words(t))),
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { class: "tick", x: right, y: height - 5, "text-anchor": "end" }, clip(bottomLabel, Math.floor(width / 7)))] };
}

const cross = (x, y) => svg("path", { class: "failed-mark", d: `M${x - 4} ${y - 4}L${x + 4} ${y + 4}M${x - 4} ${y + 4}L${x + 4} ${y - 4}` });
const endMark = (trial, x, y) => (trial.status === "failed" ? cross(x, y) : trial.status === "done" ? null
  : svg("circle", { class: "end-mark", cx: x, cy: y, r: 3, style: { stroke: colorOf(trial) } }));

// The objective over progress, a curve a trial.
function curvesOf(objective, place) {
  const xs = trials.flatMap((trial) => trial.curves[place].x), first = xs.reduce((a, b) => Math.min(a, b), data.length), last = xs.reduce((a, b) => Math.max(a, b), data.length);
  function paint(width) {
    const height = 300, { X, Y, lines, left, right, top, bottom } = plane(width, height, { low: first, high: last, whole: last - first >= 2, words: plain }, { ...objective.curve_axis, words: onAxis(objective.metric) }, data.unit);
    const points = new Map(trials.map((trial) => [trial.trial, trial.curves[place].x.map((x, i) => [X(x), trial.curves[place].y[i] === null ? null : Y(trial.curves[place].y[i], 3)])]));
    const known = (trial) => points.get(trial.trial).filter(([, y]) => y !== null);
    const line = (trial) => points.get(trial.trial).map(([x, y], i, all) => (y === null ? "" : (i && all[i - 1][1] !== null ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1))).join("");
    // What is far worse than most is beyond the frame: curves lead out of it, and ends there lie on its edge.
    const frame = "inside-" + place, inside = { "clip-path": `url(#${frame})` }, isOut = (y) => y < top || y > bottom;
    const ending = (trial) => { const own = known(trial), [x, y] = own[own.length - 1] ?? []; return own.length ? endMark(trial, x, bounded(y, top, bottom)) : null; };
    const dots = (trial, r) => known(trial).filter(([, y]) => !isOut(y)).map(([x, y]) => svg("circle", { class: "point", cx: x, cy: y, r, style: { fill: colorOf(trial) } }));
    const numOut = trials.filter((trial) => known(trial).some(([, y]) => isOut(y))).length;
    const outWords = numOut ? `${numOut} ${numOut === 1 ? "trial was" : "trials were"} ${objective.less_is_better ? "above" : "below"} at times` : "";
    const drawn = worstFirst.filter((trial) => known(trial).length);
    const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, lines,
      svg("clipPath", { id: frame }, svg("rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 4 })),
      outWords && svg("text", { class: "tick halo out", x: right, y: objective.less_is_better ? top + 8 : bottom - 6, "text-anchor": "end" }, outWords),
      drawn.map((trial) => svg("g", { class: lineClass(trial) + (isBest(trial) ? " best-line" : "") }, svg("path", { ...inside, d: line(trial), style: { stroke: colorOf(trial) } }), known(trial).length === 1 && trial.status === "done" && dots(trial, 3), ending(trial))));
    return { node, over: (trial) => (known(trial).length ? [svg("path", { class: "chosen-line", ...inside, d: line(trial), style: { stroke: colorOf(trial) } }), known(trial).length < 60 && dots(trial, 3.5), ending(trial)] : []),
      find: (x, y) => closest((trial) => toLine(known(trial), x, y), 20) };
  }
  return picture(`${objective.metric} of all trials over ${data.unit}`, POINTING, paint);
}

function toLine(points, x, y) {
  let least = Infinity;
  points.forEach(([x2, y2], i) => {
    const [x1, y1] = points[Math.max(i - 1, 0)], [dx, dy] = [x2 - x1, y2 - y1], long = dx * dx + dy * dy;
    const t = long ? bounded(((x - x1) * dx + (y - y1) * dy) / long, 0, 1) : 0;
    least = Math.min(least, Math.hypot(x1 + t * dx - x, y1 + t * dy - y));
  });
  return least;
}

// Two objectives against each other; those that none is better than in all are joined.
function scatter(first, second) {
  const [a, b] = [data.objectives[first], data.objectives[second]], front = data.front.map((number) => byNumber.get(number)).filter(Boolean);
  const known = worstFirst.filter((trial) => trial.values[first] !== null && trial.values[second] !== null);
  function paint(width) {
    const height = 320, words = (one) => onAxis(one.metric);
    const { X, Y, lines } = plane(width, height, { ...a.axis, words: words(a) }, { ...b.axis, words: words(b) }, `${a.metric}, ${a.less_is_better ? "less" : "more"} is better`);
    const at = (trial) => [X(trial.values[first]), Y(trial.values[second])], steps = front.map(at).sort((p, q) => p[0] - q[0]);
    const stair = data.objectives.length > 2 ? "" : steps.map(([x, y], i) => (!i ? `M${x} ${y}` : a.less_is_better ? `H${x}V${y}` : `V${y}H${x}`)).join("");
    const spot = (trial, kind, r) => svg("circle", { class: kind, cx: at(trial)[0], cy: at(trial)[1], r, style: { fill: colorOf(trial) } });
    return { node: svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, lines, svg("path", { class: "front-line", d: stair }),
      known.filter((trial) => !front.includes(trial)).map((trial) => spot(trial, lineClass(trial) + " behind", 4)), front.filter((trial) => known.includes(trial)).map((trial) => spot(trial, "of-trial on-front", 6.5))),
    over: (trial) => (known.includes(trial) ? [spot(trial, "spot", 8)] : []),
    find: (x, y) => closest((trial) => (known.includes(trial) ? Math.hypot(at(trial)[0] - x, at(trial)[1] - y) : Infinity), 24) };
  }
  return picture(`${b.metric} against ${a.metric}`, "Point at a trial or click it; by keyboard: arrows, Escape.", paint);
}

// A lane a trial, its color how good it was there; arrows where one took over the weights of another.
function lanes() {
  const last = Math.max(data.length, ...trials.map((trial) => trial.progress)), tall = trials.length > 60 ? 9 : 24, thick = tall * 0.5, among = ranking(goal, trials.flatMap((trial) => trial.curves[0].y));
  function paint(width) {
    const left = 62, right = width - 22, height = trials.length * tall + 34, X = (x) => left + (x / last) * (right - left);
    const Y = (number) => trials.findIndex((trial) => trial.trial === number) * tall + tall / 2 + 4, middle = new Map(trials.map((trial) => [trial.trial, Y(trial.trial)]));
    const stretches = (trial) => trial.curves[0].x.map((x, i, xs) => svg("rect", { x: X(i ? xs[i - 1] : 0), y: middle.get(trial.trial) - thick / 2, width: Math.max(X(x) - X(i ? xs[i - 1] : 0), 1), height: thick,
      style: { fill: trial.curves[0].y[i] !== null ? shade(among(trial.curves[0].y[i])) : "var(--grey)" } }));
    const arrow = (trial, part) => {
      const x = X(part.from), [y1, y2] = [middle.get(part.donor), middle.get(trial.trial)], out = bounded(8 + Math.abs(y2 - y1) * 0.09, 10, 30);
      return svg("g", { class: "arrow" }, svg("circle", { cx: x, cy: y1, r: 2.6 }), svg("path", { d: `M${x} ${y1}C${x + out} ${y1} ${x + out} ${y2} ${x + 6} ${y2}` }), svg("polygon", { points: `${x},${y2} ${x + 7},${y2 - 4} ${x + 7},${y2 + 4}` }),
        svg("title", {}, `trial ${trial.trial} took over the weights of trial ${part.donor} at ${plain(part.from)} ${data.unit}`));
    };
    const arrows = (wanted) => trials.flatMap((trial) => trial.lane.filter((part) => part.donor !== null && middle.has(part.donor) && wanted(trial, part)).map((part) => arrow(trial, part)));
    const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      niceTicks(0, last, Math.max(2, Math.floor((right - left) / 90))).map((t) => [svg("line", { class: "rule", x1: X(t), x2: X(t), y1: 4, y2: height - 26 }), svg("text", { class: "tick", x: X(t), y: height - 10, "text-anchor": "middle" }, plain(t) + (t ? "" : " " + data.unit))]),
      trials.map((trial) => svg("g", { class: "of-trial lane" }, tall > 12 && svg("text", { class: "tick" + (isBest(trial) ? " strong" : ""), x: left - 8, y: middle.get(trial.trial) + 4, "text-anchor": "end" }, "trial " + trial.trial), stretches(trial),
        trial.status === "failed" && cross(X(trial.progress) + 6, middle.get(trial.trial)))), svg("g", { class: "of-trial arrows" }, arrows(() => true)));
    const made = { node, when: null, over: (trial) => [stretches(trial), svg("rect", { class: "lane-frame", x: left - 2, y: middle.get(trial.trial) - thick / 2 - 2, width: right - left + 4, height: thick + 4 }), arrows((heir, part) => heir === trial || part.donor === trial.trial)],
      find: (x, y) => { made.when = (bounded(x, left, right) - left) / (right - left) * last; return trials[Math.floor((y - 4) / tall)] || null; } };
    return made;
  }
  const words = (trial, painted) => {
    const part = painted.when === null ? trial.lane[trial.lane.length - 1] : trial.lane.findLast((one) => one.from <= painted.when) || trial.lane[0];
    return [el("p", { class: "who" }, el("b", {}, "Trial " + trial.trial), state(trial.status), el("span", {}, `${plain(part.from)} to ${plain(part.to)} ${data.unit}`),
      el("span", {}, part.donor === null ? "with the settings that it began with" : `with the weights of trial ${part.donor} and new settings`)), pairs(part.config)];
  };
  return picture("The population over " + data.unit, "Point at a lane for the settings that it had there; by keyboard: arrows, Escape.", paint, words);
}
