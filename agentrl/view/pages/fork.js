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

// What a step taught: its tasks with the same seeds, before and after. Kept while the page is drawn anew.
const lessons = new Map();

async function taughtCard(id, step) {
  const players = stored || !step ? [] : await ask(`runs/${id}/steps/${step}/players`);
  if (players.length < 2) return null;
  const ordered = [...players].sort((a, b) => (a.version ?? 0) - (b.version ?? 0));
  const [earlier, later] = [ordered.filter((each) => each.version < step).at(-1), ordered.find((each) => each.version >= step)];
  const key = `${id} ${step}`;
  const choose = (label, usual) => el("select", { "aria-label": label }, ordered.map((each) => el("option", { value: each.name, selected: each === usual }, each.name + (each.version === null ? "" : `, version ${each.version}`))));
  const [before, after] = [choose("before", earlier), choose("after", later || ordered.at(-1))];
  const result = el("div", {}, lessons.get(key) && lessonOf(lessons.get(key)));
  const go = el("button", {}, "play both");
  go.onclick = async () => {
    go.disabled = true;
    result.replaceChildren(el("p.faint", {}, "playing the tasks of this step twice …"));
    try {
      const said = `runs/${id}/steps/${step}/taught?` + new URLSearchParams({ before: before.value, after: after.value });
      lessons.set(key, { before: before.value, after: after.value, ...(await answerOf(await fetch("api/" + said, { method: "POST" }))) });
      result.replaceChildren(lessonOf(lessons.get(key)));
    } catch (error) {
      result.replaceChildren(el("p.failure", {}, error.message));
    }
    go.disabled = false;
  };
  return el("section.card.taught", {}, el("div.row.tools", {}, el("h2", {}, "What did it teach?"), el("label.field", {}, el("span", {}, "before"), before), el("label.field", {}, el("span", {}, "after"), after), go), el("p.faint", {}, "The tasks of this step, played with the same seeds and random numbers. What moved is of all updates between the two; run.save_every = 1 keeps the checkpoints on both sides of one. Below are the groups whose advantages carried the step, the largest first."), result);
}

function lessonOf(lesson) {
  const value = (name, each) => (["tokens sampled", "turns", "reward"].includes(name) ? number(each) : Math.round(each * 100) + " %");
  const tasks = (name, counts) => counts.length > 0 && el("p", {}, name + ": ", counts.map(([task, count]) => `${task} (${count})`).join(", "));
  return el(
    "div",
    {},
    el("p", {}, `Of ${plural(lesson.count, "trajectory", "trajectories")}, ${Math.round(lesson.changed * 100)} % went another way.`),
    el("table.diff", {}, el("thead", {}, el("tr", {}, ["behaviour", lesson.before, lesson.after].map((each) => el("th", {}, each)))), el("tbody", {}, lesson.rows.map(([name, one, other]) => el("tr", {}, el("td", {}, name), el("td", {}, value(name, one)), el("td", {}, one === other ? value(name, other) : el("b", {}, value(name, other))))))),
    tasks("earn more", lesson.gained),
    tasks("earn less", lesson.lost),
  );
}
