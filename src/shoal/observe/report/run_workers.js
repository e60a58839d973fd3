// The rest of a run's page: workers, checkpoints, profiles, recipe, environment.

function middle(values) {
  const sorted = values.slice().sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function workers() {
  const all = data.workers;
  if (!all) return null;
  const most = 16, system = Object.keys(SYSTEM).filter((name) => all.rows.some((row) => name in row.system) && /^(cpu_cores|memory_bytes|gpu_busy|gpu_memory_used)$/.test(name));
  const middles = all.phases.map((_, i) => middle(all.rows.map((row) => row.seconds[i])));
  const heat = (i) => (row) => {
    if (all.phases[i] === "comm") return {}; // who waits is not the one to look at
    const more = middles[i] > 0 ? row.seconds[i] / middles[i] - 1 : 0;
    return more > 0.02 && row.seconds[i] - middles[i] > 0.01 * all.over_s ? { // not of what is short anyway
      background: `color-mix(in srgb, var(--heat) ${Math.min(more * 100, 60).toFixed(0)}%, transparent)` } : {};
  };
  const isSlow = (row) => Boolean(all.slowest) && row.rank === all.slowest.rank;
  const columns = [
    { label: "Worker", of: (row) => [row.rank, isSlow(row) && el("span", { class: "tag" }, "slowest")] },
    ...all.phases.map((phase, i) => ({ label: PHASES[phase] || phase, number: true, of: (row) => inSeconds(row.seconds[i]), style: heat(i) })),
    ...system.map((name) => ({ label: SYSTEM[name][0], number: true, of: (row) => (name in row.system ? SYSTEM[name][1](row.system[name]) : MISSING) })),
    { label: "Device", of: (row) => row.device_name || row.device || MISSING },
    { label: "Host", of: (row) => row.host || MISSING },
    { label: "Process", number: true, of: (row) => row.pid ?? MISSING },
  ];
  const working = (row) => row.seconds.reduce((sum, value, i) => sum + (all.phases[i] === "comm" ? 0 : value), 0);
  // Of many, the slowest ones first: the others are as they should be.
  const order = all.rows.slice();
  if (order.length > most) order.sort((a, b) => isSlow(b) - isSlow(a) || working(b) - working(a) || a.rank - b.rank);
  const rest = order.slice(most), sorted = rest.length ? "; the slowest come first" : "";
  const slow = all.slowest && `Worker ${all.slowest.rank} takes ${share(all.slowest.ratio - 1)} longer than ${all.count === 2 ? "the other, which waits" : "the one in the middle; the others wait"} for it.`;
  const told = !all.phases.length ? all.untold : `Seconds since the latest start, ${duration(all.over_s)} in all${all.to_step === null ? "" : `, up to step ${grouped(all.to_step, 0)}`}${all.count > 1 ? `; shaded where more than the middle of the workers${sorted}` : ""}.`;
  return section("workers", all.count === 1 ? "The worker" : `The ${grouped(all.count, 0)} workers`, [slow, told].filter(Boolean).join(" "),
    table("Workers", columns, order.slice(0, most), (row) => (isSlow(row) ? "slow" : null)),
    rest.length > 0 && details(`${grouped(rest.length, 0)} more workers`, table("More workers", columns, rest)),
    all.usage && usage(all.usage));
}

function usage(used) {
  const group = makeGroup();
  const names = Object.keys(SYSTEM).filter((name) => name in used.of);
  const color = (i) => `var(--series-${i % 8})`;
  const charts = names.map((name) => ({ title: SYSTEM[name][0], format: SYSTEM[name][1], zero: true, height: 150, marks, label: `${SYSTEM[name][0]} over time`,
    series: used.of[name].map((value, i) => ({ name: used.labels[i], color: color(i), step: used.step, time: used.time, value })).filter((one) => one.value.some((v) => v !== null)) }));
  return [el("h3", {}, "What they used"), toolbar(group, { hasTimes: Boolean(used.time) }), used.labels.length > 1 && legend(used.labels.map((label, i) => [label, color(i)])), chartGrid(charts, group, 4)];
}

function checkpoints() {
  const { rows, count, metric: name, uploads, stall_s: stall } = data.checkpoints;
  if (!rows.length) return section("checkpoints", "Checkpoints", null, el("p", { class: "empty" }, "None has been saved yet."));
  const columns = [
    { label: "Step", number: true, of: (row) => grouped(row.step, 0) },
    { label: "Saved", number: true, of: (row) => (row.time === null ? MISSING : "+" + duration(row.time)) },
    { label: "Size", number: true, of: (row) => bytes(row.bytes) },
    { label: "Steps waited", number: true, of: (row) => duration(row.stall_s) },
    { label: "Written in", number: true, of: (row) => duration(row.seconds) },
    ...(name ? [{ label: name, number: true, of: (row) => metric(name, row.value ?? null) }] : []),
    { label: "Here", of: (row) => (row.on_disk ? "on disk" : "deleted since") },
    ...(uploads ? [{ label: "Store", of: (row) => (row.uploaded ? "uploaded" : MISSING) }] : []),
  ];
  const most = 8, faded = (row) => (row.on_disk || row.uploaded ? null : "faded");
  return section("checkpoints", "Checkpoints", `${grouped(count, 0)} saved; steps waited ${duration(stall)} for them in all.`,
    table("Checkpoints", columns, rows.slice(0, most), faded),
    rows.length > most && details(`${grouped(rows.length - most, 0)} earlier ones`, table("Earlier checkpoints", columns, rows.slice(most), faded)),
    count > rows.length && el("p", { class: "note" }, `${grouped(count - rows.length, 0)} still earlier ones are in events.jsonl.`));
}

// The columns of the table that the run itself ends with in the terminal.
function profiles() {
  if (!data.profiles.length) return null;
  const ms = (value) => (value === null ? MISSING : grouped(1e3 * value, 3));
  return section("profile", "Profile", "The operators that took longest by themselves, as PyTorch's profiler saw them. Times are of one step; the share is of all that was recorded.", data.profiles.map((one) => {
    const [first, last] = [one.steps[0], one.steps[one.steps.length - 1]];
    const where = [one.rank === null ? null : `Worker ${one.rank}`, one.device, one.steps.length ? (first === last ? `step ${first}` : `steps ${first} to ${last}`) : null, one.seconds === null ? null : duration(one.seconds)].filter(Boolean).join(", ");
    return [el("h3", {}, where || "Profile"),
      table(where, [{ label: "Operator", class: "code", of: (row) => row.name }, { label: "ms a step", number: true, of: (row) => ms(row.own_s) }, { label: "Share", number: true, of: (row) => share(row.share) },
        { label: "With callees", number: true, of: (row) => ms(row.all_s) }, { label: "Calls a step", number: true, of: (row) => plain(row.calls) }], one.operators),
      one.trace && el("p", { class: "note" }, "The whole trace: ", one.link ? el("a", { href: one.link }, one.trace) : el("code", {}, one.trace), " (chrome://tracing or ui.perfetto.dev)")];
  }));
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); } catch {
    const area = el("textarea", { readonly: true, "aria-hidden": "true", class: "offscreen" }); // browsers without it, or not allowed to
    area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function recipe() {
  if (!data.recipe) return null;
  const button = el("button", { type: "button", onclick: () => copy(data.recipe, button) }, "Copy");
  return section("recipe", "Recipe", "With every default spelled out; shoal train takes it as it is.",
    details("recipe.yaml", el("div", { class: "code-box" }, button, el("pre", { tabindex: "0" }, data.recipe))));
}

function environment() {
  return section("environment", "Environment", null, el("dl", { class: "pairs" }, data.environment.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}

const parts = [ledger(), curves(), steps(), workers(), story(), checkpoints(), profiles(), recipe(), environment()].filter(Boolean);
show(`${data.name} · ${data.status}`, head(), figures(), contents(parts), ...parts, footer(data.status === "running" ? "The run was still going." : ""));
