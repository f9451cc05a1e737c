"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // Numbers, as the page writes them.
  const number = (value) => {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e7 || size < 1e-3) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
  };
  const withUnit = (value, unit) => {
    if (unit === "share") return `${Number((value * 100).toPrecision(3))} %`;
    if (unit === "bytes") {
      const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.abs(value) || 1) / 10)));
      return `${Number((value / 1024 ** power).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
    }
    return unit ? `${number(value)} ${unit}` : number(value);
  };

  // Theme: what the system says, until the reader says otherwise.
  const theme = byId("theme");
  const themes = ["auto", "dark", "light"];
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("hybridflow-theme") || "auto";
  } catch {
    // A page from a file may have no storage.
  }
  const showTheme = () => {
    if (!themes.includes(chosen)) chosen = "auto";
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    theme.textContent = { auto: "\u25d0 Auto", dark: "\u25cf Dark", light: "\u25cb Light" }[chosen];
    theme.setAttribute("aria-label", `Theme: ${chosen}`);
  };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    chosen = themes[(themes.indexOf(chosen) + 1) % themes.length];
    showTheme();
    try {
      localStorage.setItem("hybridflow-theme", chosen);
    } catch {
      // As above.
    }
  });
  showTheme();

  // Values of a curve under the pointer, or at the place that the arrow keys choose.
  const tip = byId("tip");
  const hideTip = (cross) => {
    tip.hidden = true;
    cross.hidden = true;
  };
  const showTip = (area, cross, points, index, low, high) => {
    const step = points.s[index];
    const share = high > low ? (step - low) / (high - low) : 0.5;
    const least = points.l[index];
    const most = points.h ? points.h[index] : least;
    const value = least === most ? withUnit(least, points.u) : `${withUnit(least, points.u)} to ${withUnit(most, points.u)}`;
    const mean = points.m ? `\nmean of ${points.w} steps ${withUnit(points.m[index], points.u)}` : "";
    const upTo = least === most || index + 1 >= points.s.length ? "" : ` to ${(points.s[index + 1] - 1).toLocaleString("en-US")}`;
    tip.textContent = `step ${step.toLocaleString("en-US")}${upTo}\n${value}${mean}`;
    tip.hidden = cross.hidden = false;
    cross.style.left = `${share * 100}%`;
    const box = area.getBoundingClientRect();
    const x = box.left + share * box.width;
    const left = x + 12 + tip.offsetWidth > innerWidth - 4 ? x - 12 - tip.offsetWidth : x + 12;
    const top = box.top - tip.offsetHeight - 6;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${top < 56 ? box.bottom + 6 : top}px)`;
  };
  const everyStep = Object.values(DATA.charts).flatMap((points) => (points.s ? [points.s[0], points.s.at(-1)] : []));
  const [low, high] = [Math.min(...everyStep), Math.max(...everyStep)];
  for (const figure of document.querySelectorAll(".chart[data-metric]")) {
    const points = DATA.charts[figure.dataset.metric];
    const area = figure.querySelector(".area");
    if (!area || !points || !points.s) continue;
    const cross = area.querySelector(".cross");
    let at = points.s.length - 1;
    const nearest = (event) => {
      const box = area.getBoundingClientRect();
      const step = low + ((event.clientX - box.left) / box.width) * (high - low);
      let best = 0;
      for (let i = 1; i < points.s.length; i++) {
        if (Math.abs(points.s[i] - step) < Math.abs(points.s[best] - step)) best = i;
      }
      return best;
    };
    const show = () => showTip(area, cross, points, at, low, high);
    for (const name of ["pointermove", "pointerdown"]) {
      area.addEventListener(name, (event) => {
        at = nearest(event);
        show();
      });
    }
    area.addEventListener("pointerleave", () => hideTip(cross));
    area.addEventListener("blur", () => hideTip(cross));
    area.addEventListener("focus", () => area.matches(":focus-visible") && show());
    area.addEventListener("keydown", (event) => {
      const last = points.s.length - 1;
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - Math.ceil(last / 10), PageUp: at + Math.ceil(last / 10), Home: 0, End: last };
      if (event.key === "Escape") hideTip(cross);
      if (!(event.key in moves)) return;
      event.preventDefault();
      at = Math.min(last, Math.max(0, moves[event.key]));
      show();
    });
  }

  // The filter of curves.
  const find = byId("find");
  if (find) {
    find.parentElement.hidden = false;
    find.addEventListener("input", () => {
      const wanted = find.value.trim().toLowerCase();
      let any = false;
      for (const group of document.querySelectorAll("#curves .group")) {
        let shown = 0;
        for (const item of group.querySelectorAll("[data-find]")) {
          item.hidden = !item.dataset.find.toLowerCase().includes(wanted);
          shown += !item.hidden;
        }
        const still = group.querySelector(".still");
        if (still) still.hidden = !still.querySelector("[data-find]:not([hidden])");
        group.hidden = !shown;
        any = any || shown > 0;
      }
      byId("none").hidden = any;
    });
  }

  // The browser of samples.
  const rollouts = DATA.rollouts;
  if (!rollouts.length) return;
  const slider = byId("step");
  const token = byId("token");
  const RATIO_LEVELS = [0.001, 0.01, 0.05, 0.2, 1];
  const CHANCE_LEVELS = [0.9, 0.5, 0.25, 0.1, 0.01];
  const isSampled = (row, i) => !row.m || row.m[i] === "1";
  const gapsOf = (row) =>
    row.t ? row.t.flatMap((t, i) => (isSampled(row, i) && t !== null && row.l[i] !== null ? [Math.abs(t - row.l[i]) / 1000] : [])) : [];
  const modes = [...document.querySelectorAll("input[name=mode]")];
  const rewards = rollouts.flatMap((step) => step.groups.flatMap((group) => group.rows.map((row) => row.r))).filter((r) => r !== null);
  const [leastReward, mostReward] = [Math.min(...rewards), Math.max(...rewards)];
  const gaps = rollouts.flatMap((step) => step.groups.flatMap((group) => group.rows.flatMap(gapsOf)));
  const compared = gaps.length;
  const apart = gaps.filter((gap) => gap >= 0.01).length;
  // Where nothing differs there is more to see in the probabilities.
  let mode = gaps.some((gap) => gap >= RATIO_LEVELS[0]) ? "ratio" : "rollout";
  let current = rollouts.length - 1;

  const classOf = (row, i) => {
    if (!isSampled(row, i)) return "off";
    if (mode === "ratio") {
      if (!row.t || row.t[i] === null || row.l[i] === null) return "";
      const gap = (row.t[i] - row.l[i]) / 1000;
      const level = RATIO_LEVELS.filter((bound) => Math.abs(gap) >= bound).length;
      return level ? `${gap > 0 ? "h" : "l"}${level}` : "";
    }
    const logs = mode === "rollout" ? row.l : row.t;
    if (!logs || logs[i] === null) return "";
    const level = CHANCE_LEVELS.filter((bound) => Math.exp(logs[i] / 1000) < bound).length;
    return level ? `q${level}` : "";
  };
  const shown = (piece) => {
    if (piece === "") return "\u22ef";
    if (/^ +$/.test(piece)) return piece.replaceAll(" ", "\u2423");
    return piece.replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5\t");
  };
  const fact = (list, name, value) => list.append(make("dt", "", name), make("dd", "", value));
  const logAndChance = (value) => (value === null || value === undefined ? "not known" : `${(value / 1000).toFixed(3)}`);
  const describe = (row, i) => {
    const list = make("dl");
    fact(list, "Place in the response", `${i + 1} of ${row.p.length}`);
    if (!isSampled(row, i)) {
      return [make("p", "text", shown(row.p[i])), list, make("p", "hint", "Not sampled by the policy; not trained.")];
    }
    fact(list, "Rollout log-probability", logAndChance(row.l[i]));
    if (row.l[i] !== null) fact(list, "Rollout probability", withUnit(Math.exp(row.l[i] / 1000), "share"));
    if (row.t) {
      fact(list, "Trainer log-probability", logAndChance(row.t[i]));
      if (row.t[i] !== null && row.l[i] !== null) fact(list, "Trainer / rollout ratio", Math.exp((row.t[i] - row.l[i]) / 1000).toFixed(3));
    } else fact(list, "Trainer log-probability", "not recorded");
    return [make("p", "text", shown(row.p[i])), list];
  };
  const showTokens = (row, place) => {
    const box = make("div", "toks");
    box.setAttribute("role", "listbox");
    box.setAttribute("aria-label", `Tokens of sample ${place}`);
    row.p.forEach((piece, i) => {
      if (row.g[i]) box.append(make("span", "gap", ` [${row.g[i].toLocaleString("en-US")} tokens left out] `));
      const part = make("span", `k ${classOf(row, i)}`, shown(piece));
      part.tabIndex = i ? -1 : 0;
      part.dataset.i = i;
      part.setAttribute("role", "option");
      box.append(part);
    });
    if (!row.p.length) box.append(make("span", "dim", "nothing"));
    const choose = (event) => {
      const part = event.target.closest(".k");
      if (part) token.replaceChildren(...describe(row, Number(part.dataset.i)));
    };
    box.addEventListener("pointerover", choose);
    box.addEventListener("focusin", choose);
    box.addEventListener("keydown", (event) => {
      const part = event.target.closest(".k");
      const parts = [...box.querySelectorAll(".k")];
      const at = parts.indexOf(part);
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - 10, ArrowDown: at + 10, Home: 0, End: parts.length - 1 };
      if (at < 0 || !(event.key in moves)) return;
      event.preventDefault();
      const next = parts[Math.min(parts.length - 1, Math.max(0, moves[event.key]))];
      part.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
    return box;
  };
  const showSample = (row, place) => {
    const box = make("div", "sample");
    const label = make("div", "label");
    label.append(make("strong", "", `Sample ${place}`));
    const reward = make("span");
    if (row.r !== null && mostReward > leastReward) {
      const meter = make("span", "meter");
      const bar = make("i");
      bar.style.width = `${(100 * (row.r - leastReward)) / (mostReward - leastReward)}%`;
      meter.append(bar);
      reward.append(meter);
    }
    reward.append(`reward ${row.r === null ? "none" : number(row.r)}`);
    label.append(reward, make("span", "", `${row.n.toLocaleString("en-US")} token${row.n === 1 ? "" : "s"}`));
    if (row.f) label.append(make("span", "", row.f === "length" ? "cut off (length)" : row.f));
    if (row.s !== "ok") label.append(make("span", "bad", row.s));
    box.append(label);
    if (row.e) box.append(make("p", "bad meaning", row.e));
    box.append(showTokens(row, place));
    return box;
  };
  const showGroup = (group, index) => {
    const box = make("article", "sample-group");
    const label = make("div", "label");
    const known = group.rows.map((row) => row.r).filter((r) => r !== null);
    label.append(make("strong", "", `Prompt ${index + 1}`));
    if (known.length) label.append(make("span", "", `mean reward ${number(known.reduce((a, b) => a + b, 0) / known.length)} of ${known.length} shown`));
    const prompt = make("div", "prompt", (group.cut ? `[${group.cut.toLocaleString("en-US")} tokens left out] ` : "") + group.prompt);
    prompt.tabIndex = 0;
    prompt.setAttribute("aria-label", `Text of prompt ${index + 1}`);
    prompt.setAttribute("role", "region");
    box.append(label, prompt, ...group.rows.map((row, i) => showSample(row, i + 1)));
    return box;
  };
  const key = (name, text) => make("b", name, text);
  const showLegend = () => {
    const legend = byId("legend");
    const ratio = (bound, sign) => Math.exp(sign * bound);
    if (mode === "ratio") {
      legend.replaceChildren(
        make("span", "means", "Trainer less likely"),
        ...[5, 4, 3, 2, 1].map((level) => key(`l${level}`, number(Number(ratio(RATIO_LEVELS[level - 1], -1).toFixed(3))))),
        key("", "1"),
        ...[1, 2, 3, 4, 5].map((level) => key(`h${level}`, number(Number(ratio(RATIO_LEVELS[level - 1], 1).toFixed(3))))),
        make("span", "means", `more likely than the rollout said. ${apart.toLocaleString("en-US")} of ${compared.toLocaleString("en-US")} tokens on this page differ by 1 % or more.`),
      );
    } else {
      legend.replaceChildren(
        make("span", "means", "Log-probability (probability) of the token"),
        key("", "near 0 (100 %)"),
        ...CHANCE_LEVELS.map((bound, i) => key(`q${i + 1}`, `below ${number(Math.log(bound))} (${withUnit(bound, "share")})`)),
      );
    }
  };
  const show = () => {
    const step = rollouts[current];
    slider.value = current;
    byId("where").textContent = `step ${step.step.toLocaleString("en-US")}`;
    slider.setAttribute("aria-valuetext", `step ${step.step}`);
    byId("back").disabled = current === 0;
    byId("forth").disabled = current === rollouts.length - 1;
    byId("groups").replaceChildren(...step.groups.map(showGroup));
    token.replaceChildren(make("p", "hint", "No token chosen."));
    showLegend();
  };
  const go = (to) => {
    current = Math.min(rollouts.length - 1, Math.max(0, to));
    show();
  };
  slider.addEventListener("input", () => go(Number(slider.value)));
  byId("back").addEventListener("click", () => go(current - 1));
  byId("forth").addEventListener("click", () => go(current + 1));
  for (const input of modes) {
    input.checked = input.value === mode;
    input.disabled = input.value !== "rollout" && !compared;
    if (input.disabled) input.parentElement.title = "The trainer did not score these samples";
    input.addEventListener("change", () => {
      mode = input.value;
      show();
    });
  }
  byId("browser").hidden = false;
  show();
})();
