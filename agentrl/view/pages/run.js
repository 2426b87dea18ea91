"use strict";
// One run: its curves, its configuration, and the diagnosis.

// Patterns, in the order of the page: what decides whether a run learns stands first.
const KEY_METRICS = [/^eval\/(.+\/)?avg@/, /^reward\/std$/, /^policy\/rollout_train_logprob_diff_mean$/, /^policy\/kl_ref$/, /^policy\/entropy$/, /^train\/grad_norm$/, /^rollout\/(error_fraction|truncated_fraction|tokens_per_trajectory)$/, /^train\/tokens_per_s$/];
const keyPlace = (key) => KEY_METRICS.findIndex((pattern) => pattern.test(key));
const SECTIONS = [
  ["key metrics", (key) => keyPlace(key) >= 0],
  ["rewards", (key) => key.startsWith("reward/")],
  ["times and speed", (key) => key.startsWith("time/") || key.endsWith("_per_s")],
  ["rollouts", (key) => /^(rollout|env|error|group)\//.test(key)],
  ["others", () => true],
];

function runHeader(run, here) {
  const tabs = [["", "Curves"], ["/groups", "Groups"], ["/diagnosis", "Diagnosis"], ["/config", "Configuration"]];
  const facts = [["environment", run.env], ["model", run.model && endOfPath(run.model), run.model], ["objective", run.preset], ["trajectories", run.num_trajectories && number(run.num_trajectories)]];
  return el(
    "header.run",
    {},
    el("div.row", {}, el("h1", { title: run.path }, run.name), stateOf(run), el("span.faint.step", {}, `step ${run.step}${run.num_steps ? " of " + run.num_steps : ""}`)),
    run.message && el("p.failure", {}, run.message),
    run.state === "dead" && el("p.failure", {}, "The trainer was killed: nobody holds its lock any more. Continue with --resume."),
    el("p.facts", {}, facts.filter(([, value]) => value).map(([name, value, title]) => el("span", { title }, name + " ", el("b", {}, value)))),
    el("nav.tabs", {}, tabs.map(([path, name]) => el("a", { href: address("run/" + run.id + path), "aria-current": path === here ? "page" : null }, name))),
    run.lacks && run.lacks.length > 0 && el("details.lacks", {}, el("summary", {}, "What this run did not keep"), el("ul", {}, run.lacks.map((line) => el("li", {}, line)))),
  );
}

// What metrics mean, by run; asked for again where there are more of them.
const meanings = new Map();

async function meaningsOf(id, curves) {
  const count = Object.keys(curves.series).length;
  if (meanings.get(id)?.count !== count) meanings.set(id, { count, texts: await ask(`runs/${id}/meanings`) });
  return meanings.get(id).texts;
}

// The curves so far, by run; only new lines are asked for.
const known = new Map();

async function curvesOf(id) {
  let mine = known.get(id);
  const got = await ask(`runs/${id}/metrics`, stored ? {} : { after: mine ? mine.num_rows : 0 });
  const same = mine && got.generation === mine.generation && got.num_rows >= mine.num_rows;
  if (mine && !stored && (!same || Object.keys(got.series).some((key) => !(key in mine.series)))) {
    known.delete(id); // it began anew, or has a key whose earlier values are not here
    return curvesOf(id);
  }
  if (!mine || stored) mine = got;
  else {
    mine.steps.push(...got.steps);
    for (const key of Object.keys(mine.series)) mine.series[key].push(...got.series[key]);
    mine.num_rows = got.num_rows;
  }
  known.set(id, mine);
  return mine;
}

// Controls of curves, kept in the address: which metrics, a logarithmic axis, smoothing.
function curveControls(parameters, choice, { filter, seeds = false }) {
  const box = (name, label) => el("label.field", {}, el("input", { type: "checkbox", name, checked: parameters.get(name) === "1", onchange: (event) => choice({ [name]: event.target.checked ? "1" : "" }) }), " ", el("span", {}, label));
  return el(
    "form.filters",
    { onsubmit: (event) => event.preventDefault() },
    filter && el("label.field", {}, el("span", {}, "metrics"), el("input", { name: "metrics", type: "search", placeholder: "reward|entropy", title: "a regular expression over names", value: parameters.get("metrics") || "", onchange: (event) => choice({ metrics: event.target.value.trim() }) })),
    box("log", "logarithmic"),
    box("smooth", "smoothed"),
    el("label.field", {}, el("span", {}, "over"), el("select", { name: "axis", onchange: (event) => choice({ axis: event.target.value }) }, Object.entries(AXES).map(([value, text]) => el("option", { value, selected: value === (parameters.get("axis") || "") }, text)))),
    seeds && box("bands", "seeds as bands"),
  );
}

function matcherOf(text) {
  try {
    return new RegExp(text || "", "i");
  } catch {
    return null;
  }
}

async function runPage(page, id, parameters) {
  const [run, curves] = await Promise.all([ask("runs/" + id), curvesOf(id)]);
  page.append(runHeader(run, ""));
  if (!curves.steps.length) {
    page.append(el("p.faint", {}, "No step is finished yet."));
    return 1000;
  }
  const onstep = (step) => (location.hash = address(`run/${id}/groups`, { step }));
  const choice = (changes) => change("run/" + id, changes);
  const meaning = await meaningsOf(id, curves);
  const over = parameters.get("axis") in AXES ? parameters.get("axis") : "";
  const x = places(curves, over);
  const matcher = matcherOf(parameters.get("metrics"));
  const log = parameters.get("log") === "1";
  const smooth = parameters.get("smooth") === "1";
  page.append(curveControls(parameters, choice, { filter: true }));
  if (!matcher) page.append(el("p.failure", {}, "This is not a regular expression; an example is reward|entropy."));
  if (!x) {
    page.append(el("p.failure", {}, `This run recorded no ${SUMMED[over]}; its curves stand over steps.`));
    return 1000;
  }
  if (!parameters.get("metrics")) page.append(rewardCard(curves, onstep, log, over, x, meaning["reward/mean"]));
  const left = new Set(Object.keys(curves.series).filter((key) => (parameters.get("metrics") || key !== "reward/mean") && (!matcher || matcher.test(key))).sort());
  const constants = [];
  for (const [name, belongs] of SECTIONS) {
    const keys = [...left].filter(belongs);
    if (name === "key metrics") keys.sort((a, b) => keyPlace(a) - keyPlace(b));
    const cards = [];
    for (const key of keys) {
      left.delete(key);
      const values = curves.series[key];
      const there = values.filter((v) => v !== null);
      if (!there.length) continue;
      const last = number(values[values.length - 1]);
      const [low, high] = minmax(there);
      if (there.length === values.length && high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high)) && values.length > 1) {
        constants.push([key, last]);
        continue;
      }
      const lines = [{ name: key, steps: curves.steps, x, values: smooth ? smoothed(values) : values, kind: "main" }];
      const chart = plot({ curves: lines, height: 92, limits: bounds(key), onstep, label: key, log, axis: over });
      cards.push(el("div.card.small", {}, el("div.head", {}, el("span", { title: meaning[key] }, breakable(key)), exports(key, () => chart, () => csvRows(lines, over)), el("span.value", { title: last === "–" ? "the last step has no value" : "of the last step" }, last)), chart));
    }
    if (cards.length) page.append(el("h2", {}, name), el("div.multiples", {}, cards));
  }
  if (constants.length) page.append(el("h2", {}, "constant"), el("ul.constants.card", {}, constants.map(([key, value]) => el("li", { title: meaning[key] }, el("span", {}, key), el("span.value", {}, value)))));
  return 1000;
}

function rewardCard(curves, onstep, log, over, x, meaning) {
  const means = curves.series["reward/mean"] || curves.steps.map(() => null);
  const spread = curves.series["reward/std"] || [];
  // Rewards within [0, 1] have a variance of at most mean (1 - mean); the band stays in there then.
  const within = means.every((mean, i) => mean === null || (mean >= -1e-9 && mean <= 1 + 1e-9 && (spread[i] ?? 0) ** 2 <= mean * (1 - mean) + 1e-6));
  const [least, most] = within ? [0, 1] : [-Infinity, Infinity];
  const band = curves.steps.flatMap((_, i) => (means[i] === null || spread[i] === null || spread[i] === undefined ? [] : [[x[i], Math.max(least, means[i] - spread[i]), Math.min(most, means[i] + spread[i])]]));
  const legend = [["main", "smoothed"], ["raw", "mean of a step"], ...(band.length ? [["band", "± one standard deviation of the step's rewards" + (within ? ", within [0, 1]" : "")]] : [])];
  const lines = [{ name: "reward", steps: curves.steps, x, values: means, kind: "raw" }, { name: "smoothed", steps: curves.steps, x, values: smoothed(means), kind: "main" }];
  const chart = plot({ curves: lines, bands: [{ kind: "usual", points: band }], height: 250, limits: within ? [0, 1] : undefined, onstep, label: "reward", log, axis: over });
  return el(
    "section.card",
    {},
    el("div.head", {}, el("h2", { title: meaning }, "reward"), exports("reward", () => chart, () => csvRows(lines.slice(0, 1), over)), el("span.value.big", {}, number(means[means.length - 1]))),
    chart,
    el("div.legend", {}, legend.map(([kind, name]) => el("span", {}, el("span.swatch." + kind), name))),
  );
}

async function configPage(page, id) {
  const run = await ask("runs/" + id);
  const changed = Object.entries(run.changed);
  page.append(
    runHeader(run, "/config"),
    changed.length ? el("h2", {}, "set by this run") : null,
    changed.length ? el("pre.card.config", {}, changed.map(([key, value]) => `${key} = ${value}`).join("\n")) : null,
    el("h2", {}, "all of it"),
    el("pre.card.config", {}, run.config_text || "no config.toml"),
  );
  return 0;
}

async function diagnosisPage(page, id) {
  const [run, diagnosis] = await Promise.all([ask("runs/" + id), ask(`runs/${id}/diagnosis`)]);
  const found = diagnosis.rules.filter((rule) => rule.state === "found");
  page.append(
    runHeader(run, "/diagnosis"),
    el("p.sentence", {}, diagnosis.sentence),
    el("p.faint", {}, found.length ? `${plural(found.length, "finding")}, causes before what follows from them. ` : "", "Thresholds are rules of thumb; each line shows its number."),
    el(
      "div.rules",
      {},
      diagnosis.rules.map((rule) =>
        el(
          "section.card.rule." + rule.state,
          { "data-rule": rule.id },
          el("div.row", {}, el("span.mark." + rule.state, { "aria-hidden": "true" }, { found: "!", clear: "✓", unknown: "?" }[rule.state]), el("h2", {}, rule.title), el("span.faint", {}, rule.follows ? "not so, since the reward fell" : { found: "not so", clear: "holds", unknown: "cannot tell" }[rule.state])),
          el("p", {}, rule.text),
          rule.fix && el("p.faint", {}, `${rule.fix[0].toUpperCase()}${rule.fix.slice(1)}. ${rule.why}`),
          rule.query && el("a.button", { href: address(`run/${id}/groups`, rule.query) }, rule.step === null ? "examples" : "groups of step " + rule.step),
          rule.query && rule.step > 1 && !stored && el("a.button", { href: address(`run/${id}/groups`, { step: rule.step - 1 }) }, "and of the step before"),
          rule.state === "found" && el("a.button", { href: address("", { runs: id, metric: rule.metric }) }, "curve: " + rule.metric),
        ),
      ),
    ),
  );
  return 3000;
}
