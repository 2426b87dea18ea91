"use strict";
// One tooltip for curves and tokens. Texts are set with textContent only: nothing is parsed.
const tip = document.getElementById("tip");

function show(text, x, y) {
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const left = Math.min(x + 14, document.documentElement.clientWidth - box.width - 8);
  const top = y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, top) + "px";
  tip.style.visibility = "visible";
}

function hide() {
  tip.style.visibility = "hidden";
}

for (const area of document.querySelectorAll(".area")) {
  // "step:value:text" of every point; the x axis runs linearly from data-first to data-last.
  const points = area.dataset.points.split("|").map((entry) => {
    const [step, ...text] = entry.split(":");
    return { step: Number(step), text: text.join(":") };
  });
  const first = Number(area.dataset.first);
  const last = Number(area.dataset.last);
  const mark = area.querySelector(".mark");
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const at = first + ((event.clientX - box.left) / box.width) * (last - first);
    let nearest = points[0];
    for (const point of points) {
      if (Math.abs(point.step - at) < Math.abs(nearest.step - at)) nearest = point;
    }
    const share = last > first ? (nearest.step - first) / (last - first) : 0.5;
    mark.setAttribute("x1", share * 100 + "%");
    mark.setAttribute("x2", share * 100 + "%");
    mark.style.visibility = "visible";
    show("step " + nearest.step + "\n" + nearest.text, event.clientX, event.clientY);
  });
  area.addEventListener("pointerleave", () => {
    mark.style.visibility = "hidden";
    hide();
  });
}

for (const tokens of document.querySelectorAll(".tokens")) {
  tokens.addEventListener("pointermove", (event) => {
    const token = event.target.closest("i");
    if (!token) return hide();
    const lines = ["token " + token.dataset.id + " at position " + token.dataset.at];
    if (token.dataset.p) {
      const chance = Math.exp(Number(token.dataset.p)) * 100;
      lines.push("log-probability " + token.dataset.p + " (" + chance.toPrecision(3) + " %)");
      lines.push("sampled in turn " + token.dataset.turn + " by policy version " + token.dataset.v);
    } else {
      lines.push(token.className === "c0" ? "prompt" : "environment or template, turn " + token.dataset.turn);
    }
    show(lines.join("\n"), event.clientX, event.clientY);
  });
  tokens.addEventListener("pointerleave", hide);
}
