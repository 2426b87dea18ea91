"use strict";
// One trajectory: what was said, turn by turn, and every token with what sampler and trainer made of it.

const TOKENS_IN_WINDOW = 1024;
const MOST_COMPARED_TOKENS = 600;
const COLOURS = {
  author: "who wrote it",
  logprob: "log-prob at sampling",
  advantage: "advantage",
  ratio: "ratio, live to old",
  difference: "trainer − sampler",
  mask: "mask",
  version: "policy version",
  value: "critic's value",
};

async function trajectoryPage(page, id, step, offset, parameters) {
  const path = `runs/${id}/trajectories/${step}/${offset}`;
  const [run, one] = await Promise.all([ask("runs/" + id), ask(path)]);
  const row = Math.min(Number(parameters.get("row") || one.turns.at(-1)?.row || 0), one.rows.length - 1);
  const mine = `run/${id}/t/${step}/${offset}`;
  const to = (changes) => hereWith(mine, changes);
  page.append(runHeader(run, "/groups"), factsOf(one, id), asked(one));
  page.dataset.siblings = JSON.stringify(siblingAddresses(one, id));
  if (!one.rows.length) {
    page.append(el("p.faint", {}, "Nothing was said: it failed before its first turn."));
    return 0;
  }
  if (one.rows.length > 1) {
    page.append(
      el("nav.rows", {}, el("span.faint", {}, "dialogues: "), one.rows.map((each, number_) => el("a.button", { href: to({ row: number_, at: "", token: "" }), "aria-current": number_ === row ? "true" : null }, `${number_}: ${plural(each.num_tokens, "token")}`, each.branch_of !== null && ` (from ${each.branch_of} at ${number(each.fork_at)})`))),
    );
  }
  const formatted = parameters.get("plain") !== "1";
  const said = el("section.card.said", {}, el("div.row", {}, el("h2", {}, "Dialogue"), el("label.field", {}, el("input", { type: "checkbox", checked: formatted, onchange: (event) => change(mine, { plain: event.target.checked ? "" : "1" }) }), " ", el("span", {}, "formatted")), el("span.faint.keys", { title: "j and k: next and previous message; [ and ]: the members of the group before and after" }, "keys: j k [ ]")));
  const tokens = el("section.card.tokenpanel", {}, el("h2", {}, "Tokens"));
  page.append(el("div.two", {}, said, tokens));
  await Promise.all([dialogue(said, path, one, row, formatted), tokenPanel(tokens, path, one, row, parameters, mine)]);
  forkPanel(page, path, one, row);
  await siblingPanel(page, id, path, one, row, parameters, (changes) => change(mine, changes));
  return 0;
}

function siblingAddresses(one, id) {
  const all = one.siblings.map((each) => address(`run/${id}/t/${each.step}/${each.offset}`));
  const mine = one.siblings.findIndex((each) => each.step === one.step && each.offset === one.offset);
  return { "[": all[mine - 1], "]": all[mine + 1] };
}

// [ and ] lead to the members of the group before and after this one, j and k along its messages.
document.addEventListener("keydown", (event) => {
  const siblings = document.querySelector("main")?.dataset.siblings;
  if (!siblings || event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey) return;
  const there = JSON.parse(siblings)[event.key];
  if (there) location.hash = there;
  const messages = [...document.querySelectorAll("article.message")];
  const move = { j: 1, k: -1 }[event.key];
  if (!move || !messages.length) return;
  const at = messages.indexOf(document.activeElement.closest("article.message"));
  const next = messages[Math.max(0, Math.min(at + move, messages.length - 1))];
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "start", behavior: "instant" });
});

// The question, the right answer where the environment noted it, and what was said last.
function asked(one) {
  const reference = (one.info || {}).reference;
  const shown = [
    ["question", one.question],
    ["reference", reference === undefined || reference === null ? "" : typeof reference === "string" ? reference : JSON.stringify(reference)],
    ["said last", one.answer],
  ].filter(([, text]) => text);
  return shown.length ? el("section.card.asked", {}, shown.map(([name, text]) => el("div.pair", {}, el("span.faint", {}, name), el("div.clamped", { title: text.slice(0, 600) }, text)))) : null;
}

// Parts of the reward as bars, beside their numbers.
function partsOf(parts) {
  const entries = Object.entries(parts).filter(([, value]) => value !== null);
  if (entries.length < 2) return null;
  const most = Math.max(1e-9, ...entries.map(([, value]) => Math.abs(value)));
  return el("div.parts", { "aria-label": "parts of the reward" }, entries.map(([name, value]) => el("span.part", {}, el("span", {}, name), advantageBar(value, most), el("b." + tone(value), {}, number(value)))));
}

function noted(info) {
  const entries = Object.entries(info || {});
  if (!entries.length) return null;
  const value = (each) => (each !== null && typeof each === "object" ? el("pre", {}, JSON.stringify(each, null, 1)) : el("span.body", {}, String(each)));
  const short = entries.length <= 6 && JSON.stringify(info).length < 400;
  return el("details.info", { open: short }, el("summary", {}, "what the environment noted"), el("dl.card", {}, entries.map(([name, each]) => [el("dt", {}, name), el("dd", {}, value(each))])));
}

function factsOf(one, id) {
  const facts = [
    ["reward", number(one.reward)],
    ...(Object.keys(one.reward_components).length > 1 ? [] : Object.entries(one.reward_components).map(([name, value]) => [name, number(value)])),
    ["ended", one.stop_reason.replaceAll("_", " ")],
    ["turns", one.turns.length],
    ["tokens sampled", number(one.rows.reduce((sum, row) => sum + row.num_sampled, 0))],
    ["took", number(one.total_s) + " s"],
    ...Object.entries(one.metrics).map(([name, value]) => [name, number(value)]),
  ];
  return el(
    "section.facts-of",
    {},
    el("p.trail", {}, el("a", { href: address(`run/${id}/groups`, { step: one.step }) }, "step " + one.step), " / ", el("b", {}, one.task_id), el("span.faint", {}, `  trajectory ${one.trajectory_id}, seed ${one.seed}`)),
    el("p.facts", {}, facts.map(([name, value]) => el("span", {}, name + " ", el("b", {}, value)))),
    partsOf(one.reward_components),
    noted(one.info),
    one.error && el("p.failure", {}, `failed in ${one.error.stage}: ${one.error.code}: ${one.error.message}`),
    one.siblings.length > 1 &&
      el(
        "nav.siblings",
        { "aria-label": "trajectories of the group", title: "[ and ] lead to the one before and after" },
        el("span.faint", {}, "group: "),
        one.siblings.map((each) => el("a.button.small", { href: address(`run/${id}/t/${each.step}/${each.offset}`), "aria-current": each.offset === one.offset ? "true" : null, title: each.preview }, el("span." + tone(each.reward), {}, number(each.reward)))),
      ),
  );
}

// what was said ------------------------------------------------------------------------------

async function dialogue(box, path, one, row, formatted, start = 0) {
  const got = await ask(path + "/messages", { row, start: start || "" });
  const turnOf = new Map(one.turns.map((turn, number_) => [turn, number_]).filter(([turn]) => turn.row === row).map(([turn, number_]) => [turn.message, number_]));
  if (one.rows[row].branch_of !== null) {
    // A forked dialogue repeats the beginning of another, with its turns in it.
    for (let n = one.turns.findLastIndex((turn) => turn.row === row); n >= 0 && n !== null; n = one.turns[n].parent ?? -1) if (!turnOf.has(one.turns[n].message)) turnOf.set(one.turns[n].message, n);
  }
  got.messages.forEach((message, i) => box.append(messageBox(message, got.start + i, turnOf.get(got.start + i), one, path, row, formatted)));
  const next = got.start + got.messages.length;
  if (next < got.num_messages) {
    const more = el("button", { onclick: () => (more.remove(), dialogue(box, path, one, row, formatted, next)) }, `${number(got.num_messages - next)} more messages`);
    box.append(more);
  }
  if (!got.num_messages) box.append(el("p.faint", {}, "no messages were kept"));
}

function messageBox(message, place, turnNumber, one, path, row, formatted) {
  const turn = turnNumber === undefined ? null : one.turns[turnNumber];
  const kind = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "user";
  return el(
    "article.message." + kind,
    { tabindex: -1 },
    el(
      "div.by",
      {},
      el("b", {}, message.role),
      message.name && el("span", {}, message.name),
      turn && el("span", {}, `turn ${turnNumber}, ${plural(turn.num_tokens, "token")}, ${number(turn.generate_s)} s`),
      turn && turn.reward !== 0 && el("span." + tone(turn.reward), {}, "reward " + number(turn.reward)),
      turn && turn.finish_reason !== "stop" && el("span.negative", {}, turn.finish_reason),
      turn && turn.parse_status === "malformed" && el("span.negative", {}, "malformed tool call"),
      turn && turn.row === row && el("button.link", { onclick: () => document.dispatchEvent(new CustomEvent("go", { detail: turn.start })) }, "its tokens"),
      !turn && message.role !== "assistant" && !message.images.length && forkMessage(one, row, place),
    ),
    textOf(message, "reasoning", path, row, place, null),
    folded(message, kind, textOf(message, "content", path, row, place, !formatted ? null : kind === "tool" ? result : markdown)),
    message.images.length > 0 && el("div.pictures", {}, message.images.map((sha256, i) => pictureOf(path, sha256, "image " + (i + 1)))),
    message.tool_calls.map((call) => callBox(call, formatted)),
  );
}

// An image of a message, small; a click shows it in full size. The server gives it by its hash, and a
// report holds those that it has room for.
function pictureOf(path, sha256, name) {
  const address = `api/${path.split("/trajectories/")[0]}/images/${sha256}`;
  const source = stored ? stored[address] : address;
  if (!sha256 || !source) return el("span.faint", {}, sha256 ? name + " is not in this report" : name + " has no hash");
  const picture = () => el("img", { src: source, alt: name });
  const enlarge = () => {
    const whole = el("dialog.whole", { onclick: () => whole.close(), onclose: () => whole.remove() }, picture());
    document.body.append(whole);
    whole.showModal();
  };
  return el("button.picture", { title: name + " in full size", onclick: enlarge }, picture(), el("span.faint", {}, name));
}

// Long instructions and long results of tools are folded, so that a dialogue reads as one.
const FOLDED_CHARS = 1200;

function folded(message, kind, box) {
  const text = message.content || "";
  if (!box || !["system", "tool"].includes(kind) || text.length <= FOLDED_CHARS) return box;
  const beginning = text.trimStart().split("\n", 1)[0].slice(0, 120);
  const all = text.length + (message.content_left_out || 0) + (message.content_end || "").length;
  return el("details.folded", {}, el("summary", {}, beginning + " … ", el("span.faint", {}, plural(all, "character"))), box);
}

// A tool's answer is no Markdown, but it may be a patch.
function result(text) {
  return isPatch(text) ? patch(text) : inert(text);
}

function textOf(message, name, path, row, place, format) {
  if (!message[name]) return null;
  const drawing = format || inert;
  const box = el("div.body." + name + (format === markdown ? ".formatted" : ""), {}, drawing(message[name]));
  if (message[name + "_left_out"]) {
    const show = async () => {
      const text = (await ask(path + "/messages", { row, start: place, whole: true })).messages[0][name];
      box.replaceChildren();
      append(box, [drawing(text)]);
    };
    const whole = el("button.link", { onclick: show }, `${number(message[name + "_left_out"])} characters left out: show all`);
    box.append(el("div.gap", {}, whole));
    append(box, [drawing(message[name + "_end"])]);
  }
  return box;
}

// A call, with arguments of several lines, such as a program or a patch, as they are meant.
function callBox(call, formatted) {
  const made = call && call.function;
  const given = made && made.arguments && typeof made.arguments === "object" ? Object.entries(made.arguments) : [];
  const long = given.filter(([, value]) => typeof value === "string" && value.includes("\n"));
  if (!formatted || !long.length) return el("pre.call", {}, callText(call));
  const short = Object.fromEntries(given.map(([key, value]) => [key, typeof value === "string" && value.includes("\n") ? "…" : value]));
  return [el("pre.call", {}, callText({ function: { name: made.name, arguments: short } })), long.map(([key, value]) => el("div.argument", {}, el("span.faint", {}, key), code(value)))];
}

function callText(call) {
  const made = call && call.function;
  if (made && typeof made.name === "string" && made.arguments && typeof made.arguments === "object") {
    return made.name + "(" + Object.entries(made.arguments).map(([key, value]) => key + "=" + JSON.stringify(value)).join(", ") + ")";
  }
  return JSON.stringify(call, null, 1);
}

// tokens -------------------------------------------------------------------------------------

async function tokenPanel(box, path, one, row, parameters, mine) {
  const has = one.rows[row].has_signals;
  const total = one.rows[row].num_tokens;
  let colour = parameters.get("colour") || localChoice("colour", has ? "advantage" : "logprob");
  if (!(colour in COLOURS)) colour = "logprob";
  let asIds = parameters.get("ids") === "1";
  const wanted = parameters.get("token");
  let start = Math.max(0, Math.min(Number(parameters.get("at") || 0) || 0, total - 1));
  // The address says what is shown, without drawing the page anew.
  const remember = (changes) => here().path === mine && history.replaceState(null, "", hereWith(mine, changes));
  const view = el("div.tokens", { tabindex: 0, role: "textbox", "aria-readonly": "true", "aria-label": "tokens; arrow keys move, values follow" });
  const swatches = el("div.swatches");
  const where = el("span.faint");
  const detail = el("div.detail.faint", {}, "Point at a token, tap it, or use the arrow keys.");
  const fork = el("div");
  const jump = el("input", { type: "number", min: 0, max: Math.max(0, total - 1), value: start, "aria-label": "first token shown", onchange: () => show(Number(jump.value)) });
  const slide = el("input", { type: "range", min: 0, max: Math.max(0, total - 1), step: TOKENS_IN_WINDOW, value: start, "aria-label": "place in the row", onchange: () => show(Number(slide.value)) });
  const select = el("select", { "aria-label": "colour by", onchange: () => ((colour = select.value), keepChoice("colour", colour), remember({ colour }), draw()) }, Object.entries(COLOURS).map(([key, text]) => el("option", { value: key, selected: key === colour }, text)));
  const ids = el("label", {}, el("input", { type: "checkbox", checked: asIds, onchange: (event) => ((asIds = event.target.checked), remember({ ids: asIds ? "1" : "" }), draw()) }), "raw ids");
  let data = null;
  let current = -1;

  function draw() {
    const level = colouring(colour, data);
    swatches.replaceChildren(...legendOf(colour, data), ...(data.images.some(Boolean) ? [el("span", {}, el("i.c.image", {}, "▦"), " image")] : []));
    view.replaceChildren(
      ...data.ids.map((id, i) => {
        const again = data.images[i] && data.images[i] === data.images[i - 1] && id === data.ids[i - 1];
        const text = asIds || !data.texts ? id + " " : again ? "▦" : data.texts[i].replaceAll("\n", "⏎\n");
        const token = el("i." + (level(i) || "c") + (data.images[i] ? ".image" : ""), {}, text || "·");
        token.dataset.i = i;
        return token;
      }),
    );
    current = -1;
  }

  async function show(from) {
    start = Math.max(0, Math.min(from, total - 1));
    data = await ask(path + "/tokens", { row, start, count: TOKENS_IN_WINDOW });
    jump.value = slide.value = start;
    where.textContent = `${number(start)} to ${number(start + data.ids.length)} of ${number(total)}`;
    draw();
    if (view.isConnected) remember({ at: start || "", token: "" });
  }

  function chosen(i) {
    remember({ token: data.start + i });
    const detailOf = { position: data.start + i, text: data.texts ? data.texts[i] : String(data.ids[i]) };
    fork.replaceChildren(...[data.sampled[i] && forkButton(one, `sample from position ${data.start + i}`, detailOf)].filter(Boolean));
    return describe(i);
  }

  function describe(i) {
    view.querySelector(".current")?.classList.remove("current");
    view.children[i]?.classList.add("current");
    current = i;
    const lines = tokenLines(data, i);
    detail.replaceChildren(...lines.map((line) => el("div", {}, line)));
    return lines;
  }

  view.addEventListener("pointermove", (event) => {
    const token = event.target.closest("i");
    if (token) showTip(describe(Number(token.dataset.i)), event.clientX, event.clientY);
    else hideTip();
  });
  view.addEventListener("click", (event) => {
    const token = event.target.closest("i");
    if (token) chosen(Number(token.dataset.i));
  });
  view.addEventListener("pointerleave", hideTip);
  view.addEventListener("keydown", async (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (event.key === "PageDown" && start + TOKENS_IN_WINDOW < total) await show(start + TOKENS_IN_WINDOW);
    else if (event.key === "PageUp" && start > 0) await show(start - TOKENS_IN_WINDOW);
    else if (move) chosen(Math.max(0, Math.min(current + move, data.ids.length - 1)));
    else return;
    view.children[current]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });
  const onGo = (event) => {
    if (!view.isConnected) return document.removeEventListener("go", onGo);
    const place = event.detail;
    (place < start || place >= start + data.ids.length ? show(Math.max(0, place - 16)) : Promise.resolve()).then(() => {
      chosen(place - start);
      view.focus();
      view.children[current]?.scrollIntoView({ block: "nearest" });
    });
  };
  document.addEventListener("go", onGo);
  box.append(
    el("div.row.tools", {}, el("label.field", {}, el("span", {}, "colour"), select), ids, has ? el("span.faint", {}, "mean advantage ", el("b", {}, signed(one.rows[row].advantage))) : el("span.faint", {}, "not trained on, or no signals were kept")),
    swatches,
    view,
    detail,
    fork,
    total > TOKENS_IN_WINDOW ? el("div.row.window", {}, el("button", { onclick: () => show(start - TOKENS_IN_WINDOW) }, "previous"), slide, el("button", { onclick: () => show(start + TOKENS_IN_WINDOW) }, "next"), el("label.field", {}, el("span", {}, "from"), jump), where) : where,
  );
  await show(start);
  if (wanted !== null && Number(wanted) >= start && Number(wanted) < start + data.ids.length) chosen(Number(wanted) - start);
}

function tokenLines(data, i) {
  const lines = [`token ${data.ids[i]} at position ${data.start + i}, turn ${data.turns[i]}`];
  if (data.images[i]) return [...lines, `stands for image ${data.images[i]} of the row`];
  if (!data.sampled[i]) return [...lines, data.turns[i] === 0 ? "prompt, or environment" : "environment or template"];
  const logprob = data.logprobs[i];
  lines.push(`log-prob at sampling ${number(logprob)} (${(Math.exp(logprob) * 100).toPrecision(3)} %), policy version ${data.versions[i]}`);
  if (!data.trained || !data.trained[i]) return [...lines, data.trained ? "left out of the loss" : "no signals were kept"];
  lines.push(`advantage ${signed(data.advantages[i])}, weight in the loss ${number(data.weights[i])}`);
  lines.push(`trainer: old ${number(data.old_logprobs[i])}, live ${number(data.live_logprobs[i])}, ratio ${number(data.ratios[i])}`);
  lines.push(`trainer − sampler ${signed(data.differences[i])}`);
  if (data.values) lines.push(`critic's value ${number(data.values[i])}`);
  for (const [name, kept] of Object.entries(data.kept)) lines.push(`${name}: ${kept[i] ? "kept" : "masked out"}`);
  return lines;
}

function colouring(colour, data) {
  const author = (i) => (data.sampled[i] ? null : data.turns[i] === 0 ? "c.ctx" : "c.env");
  const diverging = (value, limits) => {
    if (value === null || value === undefined) return "c";
    const size = limits.filter((limit) => Math.abs(value) >= limit).length;
    return size === 0 ? "c.zero" : "c." + (value > 0 ? "p" : "n") + size;
  };
  const of = {
    author: (i) => (data.sampled[i] ? "c.s1" : "c"),
    logprob: (i) => "c.s" + [0.9, 0.5, 0.1, 0.01].filter((p) => Math.exp(data.logprobs[i]) < p).length,
    advantage: (i) => diverging(data.advantages?.[i], [0.02, 0.4, 1, 2]),
    ratio: (i) => diverging(data.ratios && data.ratios[i] !== null ? Math.log(data.ratios[i]) : null, [0.001, 0.05, 0.2, 0.5]),
    difference: (i) => diverging(data.differences?.[i], [1e-4, 1e-2, 0.1, 1]),
    mask: (i) => (!data.trained ? "c" : !data.trained[i] ? "c.n2" : Object.values(data.kept).every((kept) => kept[i]) ? "c.p2" : "c.n4"),
    version: (i) => "c.v" + (data.versions[i] % 6),
    value: (i) => diverging(data.values?.[i], [0.02, 0.2, 0.5, 1]),
  }[colour];
  return (i) => author(i) || of(i);
}

function legendOf(colour, data) {
  const swatch = (kind, text) => el("span", {}, el("i.c." + kind, {}, "  "), " " + text);
  const context = [swatch("ctx", "prompt"), swatch("env", "environment")];
  const range = (limits) => [swatch("n4", "≤ −" + limits[3]), swatch("n2", "−" + limits[1]), swatch("zero", "0"), swatch("p2", "+" + limits[1]), swatch("p4", "≥ +" + limits[3])];
  const missing = { advantage: "advantages", ratio: "ratios", difference: "differences", mask: "trained", value: "values" }[colour];
  if (missing && !data[missing]) return [el("span.faint", {}, "not kept for this trajectory")];
  return {
    author: [...context, swatch("s1", "policy")],
    logprob: [...context, swatch("s0", "sure"), swatch("s2", "< 50 %"), swatch("s4", "< 1 %: surprising")],
    advantage: [...context, ...range([0.02, 0.4, 1, 2])],
    ratio: [...context, ...range([0.001, 0.05, 0.2, 0.5]).slice(0, 5), el("span.faint", {}, "(log)")],
    difference: [...context, ...range([1e-4, 1e-2, 0.1, 1])],
    mask: [...context, swatch("p2", "trained"), swatch("n2", "not in the loss"), swatch("n4", "masked out")],
    version: [...context, ...[...new Set(data.versions.filter((v) => v >= 0))].slice(0, 12).map((v) => swatch("v" + (v % 6), "version " + v))],
    value: [...context, ...range([0.02, 0.2, 0.5, 1])],
  }[colour];
}

function localChoice(key, usual) {
  return sessionChoices.get(key) || usual;
}
function keepChoice(key, value) {
  sessionChoices.set(key, value);
}
const sessionChoices = new Map();

// the difference to a sibling ----------------------------------------------------------------

async function siblingPanel(page, id, path, one, row, parameters, choice) {
  const others = one.siblings.filter((each) => each.offset !== one.offset);
  if (!others.length || stored) return;
  const other = others.find((each) => String(each.offset) === parameters.get("with"));
  const select = el("select", { "aria-label": "compare with", onchange: () => choice({ with: select.value }) }, el("option", { value: "" }, "a sibling …"), others.map((each) => el("option", { value: each.offset, selected: each === other }, `${each.trajectory_id}, reward ${number(each.reward)}`)));
  const box = el("section.card", {}, el("div.row", {}, el("h2", {}, "Compared with"), select));
  page.append(box);
  if (!other) return;
  const its = `runs/${id}/trajectories/${other.step}/${other.offset}`;
  const [mine, theirs] = await Promise.all([ask(path + "/tokens", { row, count: 4096 }), ask(its + "/tokens", { row: 0, count: 4096 })]);
  let common = 0;
  while (common < mine.ids.length && mine.ids[common] === theirs.ids[common]) common++;
  const cut = (data) => ({ ids: data.ids.slice(common, common + MOST_COMPARED_TOKENS), texts: (data.texts || data.ids.map((i) => i + " ")).slice(common, common + MOST_COMPARED_TOKENS) });
  const [left, right] = [cut(mine), cut(theirs)];
  const [keptLeft, keptRight] = longestCommon(left.ids, right.ids);
  const column = (name, data, kept) => el("div", {}, el("h3", {}, name), el("div.tokens", {}, data.texts.map((text, i) => el("i.c" + (kept.has(i) ? "" : ".s2"), {}, (text || "·").replaceAll("\n", "⏎\n")))));
  box.append(el("p.faint", {}, `The first ${plural(common, "token")} ${common === 1 ? "is" : "are"} the same.`), el("div.two", {}, column("this one", left, keptLeft), column("its sibling", right, keptRight)));
}

// Places of a longest common subsequence in either list.
function longestCommon(a, b) {
  const width = b.length + 1;
  const length = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
  const places = [new Set(), new Set()];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) places[0].add(i++), places[1].add(j++);
    else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
    else j++;
  }
  return places;
}
