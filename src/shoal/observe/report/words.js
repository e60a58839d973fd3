// Numbers as people read them.

const MISSING = "–";

function grouped(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function plain(value) {
  if (value === null || value === undefined) return MISSING;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  if (Number.isInteger(value)) return grouped(value, 0);
  return size >= 1000 ? grouped(value, 0) : String(Number(value.toPrecision(4)));
}

// Seconds that are to be compared with each other: in one unit, whatever their size.
const inSeconds = (value) => (value >= 1000 ? grouped(value, 0) : value >= 100 ? value.toFixed(1) : value.toFixed(2));

const share = (value) =>
  value === null || value === undefined ? MISSING
    : (value * 100).toFixed(value && Math.abs(value) < 0.1 ? (Math.abs(value) < 0.0095 ? 2 : 1) : 1) + " %";

function metric(name, value) {
  if (value === null || value === undefined) return MISSING;
  if (/accuracy$/.test(name)) return (value * 100).toFixed(2) + " %";
  if (/_per_s$/.test(name)) return rate(value);
  return plain(value);
}

const rate = (value) =>
  value === null || value === undefined ? MISSING : value >= 100 ? grouped(value, 0) : String(Number(value.toPrecision(3)));

function duration(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return Number((seconds * 1e6).toPrecision(3)) + " µs";
  if (size < 1) return Number((seconds * 1e3).toPrecision(3)) + " ms";
  if (size < 60) return Number(seconds.toPrecision(3)) + " s";
  const whole = Math.round(size), sign = seconds < 0 ? "-" : "";
  if (whole < 3600) return sign + Math.floor(whole / 60) + " min" + (whole % 60 ? " " + (whole % 60) + " s" : "");
  const minutes = Math.round(whole / 60), hours = Math.floor(minutes / 60);
  if (hours < 48) return sign + hours + " h" + (minutes % 60 ? " " + (minutes % 60) + " min" : "");
  return sign + Math.floor(hours / 24) + " d" + (hours % 24 ? " " + (hours % 24) + " h" : "");
}

function bytes(value) {
  if (value === null || value === undefined) return MISSING;
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + " " + unit;
  return Number(value.toPrecision(3)) + " B";
}

const hours = (seconds) => {
  const value = seconds / 3600;
  return value === 0 ? "0" : Math.abs(value) >= 100 ? grouped(value, 0) : value.toFixed(Math.abs(value) >= 1 ? 2 : 4);
};

const money = (value) =>
  value === null || value === undefined ? MISSING : grouped(value, Math.abs(value) >= 0.995 || value === 0 ? 2 : 4);

function clock(unixSeconds) {
  const date = new Date(unixSeconds * 1000), two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

const KINDS = {
  text: (value) => value ?? MISSING, code: (value) => value ?? MISSING,
  count: (value) => (value === null ? MISSING : grouped(value, 0)), share, duration, rate, money, bytes,
};
const written = (kind, value, name) => (kind === "metric" ? metric(name, value) : KINDS[kind](value));

const SYSTEM = {
  cpu_cores: ["CPU cores busy", plain], memory_bytes: ["Memory", bytes], host_memory_used: ["Machine's memory taken", share],
  gpu_busy: ["GPU busy", share], gpu_memory_bytes: ["GPU memory", bytes], gpu_memory_used: ["GPU memory taken", share],
  gpu_power_w: ["GPU power", (v) => (v === null ? MISSING : Math.round(v) + " W")],
  gpu_celsius: ["GPU temperature", (v) => (v === null ? MISSING : Math.round(v) + " °C")],
  disk_read_bytes_per_s: ["Read from disk", (v) => bytes(v) + "/s"], disk_written_bytes_per_s: ["Written to disk", (v) => bytes(v) + "/s"],
  net_received_bytes_per_s: ["Received by the machine", (v) => bytes(v) + "/s"],
  net_sent_bytes_per_s: ["Sent by the machine", (v) => bytes(v) + "/s"],
};

const PHASES = {
  start: "start", data: "wait for data", h2d: "copy to device", forward: "forward", backward: "backward",
  forward_backward: "forward + backward", optimizer: "optimizer", comm: "wait for others", compile: "compiling", checkpoint: "saving",
  evaluate: "evaluation", report: "reporting", end: "end", other: "other",
};
const phaseColor = (phase) => `var(--phase-${phase in PHASES ? phase : "other"})`;
const ledgerColor = (name) => `var(--ledger-${name})`;
