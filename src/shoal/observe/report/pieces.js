// What both kinds of pages are made of.

const data = JSON.parse(document.getElementById("data").textContent);
const STATUS = { done: "good", failed: "bad", interrupted: "warn", stopped: "warn", running: "live" };

const pill = (status) => el("span", { class: "pill " + (STATUS[status] || "warn") }, status);

// parts: {label, value, color}. One bar, each part as wide as its share.
function bar(label, parts, total) {
  const words = parts.map((part) => `${part.label} ${share(part.value / total)}`).join(", ");
  return el("div", { class: "bar", role: "img", "aria-label": `${label}: ${words}` },
    parts.filter((part) => part.value > 0).map((part) =>
      el("span", { title: `${part.label}: ${share(part.value / total)}`, style: { background: part.color, "flex-grow": part.value / total } })));
}

function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([label, color, note]) =>
    el("li", {}, swatch(color), el("span", {}, label), note && el("b", {}, note))));
}

const ledgerParts = (ledger) => ledger.rows.map((row) => ({ label: row.label, value: row.seconds, color: ledgerColor(row.name) }))
  .concat(ledger.unaccounted_s > 0 ? [{ label: "not accounted for", value: ledger.unaccounted_s, color: "var(--ledger-none)" }] : []);

function choice(label, options, chosen, onchange) {
  const name = "choice-" + ++chartCount;
  return el("fieldset", { class: "choice" }, el("legend", {}, label), options.map(([value, words, disabled]) =>
    el("label", {}, el("input", { type: "radio", name, value, checked: value === chosen, disabled, onchange: () => onchange(value) }), el("span", {}, words))));
}

// Settings of a group of charts: what is along the x axis, log scale, smoothing, and the way back from a zoom.
function toolbar(group, { hasTimes, log, smooth }) {
  const said = () => (group.smooth ? (group.smooth * 100).toFixed(1) + " %" : "off"), out = el("output", {}, said());
  const reset = el("button", { type: "button", class: "reset", hidden: true, onclick: () => group.zoomTo(null) }, "Reset zoom");
  group.onZoom.push((range) => { reset.hidden = range === null; });
  return el("div", { class: "toolbar", role: "toolbar", "aria-label": "Chart settings" },
    choice("Along", [["step", "steps"], ["time", "time", !hasTimes]], "step", (by) => { group.by = by; group.cursor = null; group.zoomTo(null); }),
    log && el("label", { class: "check" }, el("input", { type: "checkbox", onchange: (event) => { group.log = event.target.checked; group.redraw(); } }), "Log scale"),
    smooth && el("label", { class: "slider" }, "Smoothing", el("input", { type: "range", min: "0", max: "0.1", step: "0.005", value: group.smooth,
      oninput: (event) => { group.smooth = Number(event.target.value); out.textContent = said(); group.redraw(); } }), out),
    reset);
}

// charts: {title, format, series, head}: the first few in full, the others on demand.
function chartGrid(charts, group, shown) {
  const card = ({ title, head, note, ...spec }) => el("figure", { class: "card" },
    el("figcaption", {}, el("h3", {}, title), head), makeChart(spec, group).host, note && el("p", { class: "note" }, note));
  const grid = (some) => el("div", { class: "grid" }, some.map(card));
  if (charts.length <= shown + 1) return grid(charts);
  return [grid(charts.slice(0, shown)), details(`${charts.length - shown} more charts`, grid(charts.slice(shown)))];
}

// Of many points, the course is what one wants to see first; the points themselves stay behind it.
const firstSmoothing = (charts) => (charts.some((chart) => chart.series.some((one) => one.value.length > 400)) ? 0.02 : 0);
const most = (name) => (/accuracy$/.test(name) ? 1 : undefined);
const isExact = (name) => name === "lr";

const how = () => el("p", { class: "note how" }, "Point at a chart for values, drag to zoom, double-click to see all. By keyboard: arrows, + and −, Escape.");

function footer(words) {
  return el("footer", {}, words, ` Made by ${data.made.by} on ${clock(data.made.at)}. Times are in your time zone. This page needs no network and loads nothing.`);
}

function contents(parts) {
  return el("nav", { "aria-label": "Sections" }, parts.filter(Boolean).map((part) => el("a", { href: "#" + part.id }, part.querySelector("h2").textContent)));
}

function show(title, ...parts) {
  document.title = title;
  document.getElementById("page").replaceChildren(...parts.flat().filter(Boolean));
  drawCharts();
  const opened = [];
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details:not([open])").forEach((one) => { one.open = true; opened.push(one); });
    allCharts.forEach((chart) => chart.draw(chart.host.closest(".grid") ? 340 : 690));
  });
  window.addEventListener("afterprint", () => {
    opened.splice(0).forEach((one) => { one.open = false; });
    allCharts.forEach((chart) => chart.draw());
  });
}
