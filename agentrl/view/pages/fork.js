"use strict";
// Sampling on from a token, or from an edited message: `agentrl view --play`. The branches stand beside
// the recorded trajectory, from the fork on.

function forkButton(one, text, detail, kind = "button.small") {
  if (!one.players?.length || stored) return null;
  return el(kind, { onclick: () => document.dispatchEvent(new CustomEvent("fork", { detail })) }, text);
}

function forkMessage(one, row, place) {
  const reads = one.turns.find((turn) => turn.row === row && turn.message > place);
  return reads && forkButton(one, "edit, and sample from here", { message: place, position: reads.start }, "button.link");
}

function forkPanel(page, path, one, row) {
  if (!one.players?.length || stored) return;
  const box = el("section.card.fork", { hidden: true }, el("h2", {}, "Sample from here"));
  page.append(box);
  let forks = 0;
  const onFork = async ({ detail }) => {
    if (!box.isConnected) return document.removeEventListener("fork", onFork);
    box.hidden = false;
    const replaced = el("textarea", { rows: detail.message === undefined ? 1 : 6, "aria-label": "text in its place", placeholder: "empty: the token is sampled anew" });
    if (detail.message !== undefined) replaced.value = (await ask(path + "/messages", { row, start: detail.message, whole: true })).messages[0].content;
    const player = el("select", { "aria-label": "who plays" }, one.players.map((each) => el("option", { value: each.name }, each.name + (each.version === null ? "" : `, version ${each.version}`))));
    const count = el("input", { type: "number", min: 1, max: 64, value: 4, "aria-label": "number of branches" });
    const results = el("div.forks");
    const go = el("button", {}, "sample");
    go.onclick = async () => {
      const place = detail.message === undefined ? { position: detail.position, ...(replaced.value ? { text: replaced.value } : {}) } : { message: detail.message, text: replaced.value };
      go.disabled = true;
      const said = el("p.faint", {}, `${player.value} plays; a model that was not loaded yet takes a moment …`);
      results.prepend(said);
      try {
        const asked = { row, player: player.value, count: Number(count.value), seed: forks++, ...place };
        const headers = { "Content-Type": "application/json" };
        const got = await answerOf(await fetch(`api/${path}/fork`, { method: "POST", headers, body: JSON.stringify(asked) }));
        const old = await ask(path + "/tokens", { row, start: detail.position, count: TOKENS_IN_WINDOW });
        said.replaceWith(forkResult(one, row, asked, got, old));
      } catch (error) {
        said.replaceWith(el("p.failure", {}, error.message));
      }
      go.disabled = false;
    };
    const what = detail.message === undefined ? ["the token ", el("code", {}, detail.text || "·"), ` at position ${detail.position}, and all before it as recorded. In its place:`] : [`message ${detail.message}, edited. The next turn reads this text in its place:`];
    box.replaceChildren(el("h2", {}, "Sample from here"), el("p", {}, what), replaced, el("div.row.tools", {}, el("label.field", {}, el("span", {}, "played by"), player), el("label.field", {}, el("span", {}, "branches"), count), go, versionNote(one)), results);
    box.scrollIntoView({ block: "nearest" });
    replaced.focus({ preventScroll: true });
  };
  document.addEventListener("fork", onFork);
}

// A checkpoint of exactly the version that sampled is rarely kept.
function versionNote(one) {
  const own = one.version;
  return el("span.faint", {}, one.players.some((each) => each.version === own) ? `version ${own} played the recorded one` : `version ${own} played the recorded one, and no checkpoint of it is kept: the nearest is named first`);
}

function forkResult(one, row, asked, got, old) {
  const before = one.rows[row].advantage;
  const after = got.members[one.trajectory_id];
  const recorded = { reward: one.reward, advantage: after, stop_reason: one.stop_reason, error: one.error && one.error.message, ...old };
  const scored = got.branches.filter((each) => each.reward !== null);
  const mean = scored.reduce((sum, each) => sum + each.reward, 0) / Math.max(1, scored.length);
  return el(
    "div.forkresult",
    {},
    el("h3", {}, asked.message !== undefined ? `message ${asked.message} edited` : asked.text ? ["“", asked.text, `” at ${asked.position}`] : `sampled anew at ${asked.position}`, `, by ${asked.player}: mean reward ${number(mean)} of ${plural(scored.length, "branch", "branches")}`),
    got.note && el("p.faint", {}, got.note),
    after !== undefined && el("p.faint", {}, `Advantages as if the branches were of the group; that of the recorded one was ${signed(before)}.`),
    el("div.branches", {}, branchCard("recorded", recorded), got.branches.map((each, i) => branchCard("branch " + (i + 1), each))),
  );
}

function branchCard(name, branch) {
  const level = (i) => (branch.sampled[i] ? "c.s" + [0.9, 0.5, 0.1, 0.01].filter((p) => Math.exp(branch.logprobs[i]) < p).length : "c.env");
  return el(
    "article.branch",
    {},
    el("div.by", {}, el("b", {}, name), el("span." + tone(branch.reward), {}, "reward " + number(branch.reward)), el("span." + tone(branch.advantage), {}, "advantage " + signed(branch.advantage)), el("span.faint", {}, branch.stop_reason.replaceAll("_", " "))),
    branch.error && el("p.failure", {}, branch.error),
    el("div.tokens", {}, branch.ids.map((id, i) => el("i." + level(i), {}, (branch.texts ? branch.texts[i] : id + " ").replaceAll("\n", "⏎\n") || "·"))),
  );
}
