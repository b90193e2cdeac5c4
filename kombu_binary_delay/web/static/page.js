// What the pages do beside htmx: ask again while they are seen, write times in the reader's zone,
// say what changed to screen readers, and draw the chart. No inline code: the policy forbids it.
"use strict";
(() => {
  const EVERY = 3000; // milliseconds
  const SELECTED = 60000; // milliseconds for which text that somebody has selected stays
  const zone = new Intl.DateTimeFormat(undefined, { timeZoneName: "short" })
    .formatToParts(new Date()).find((part) => part.type === "timeZoneName").value;
  // In January and in July, as some zones are UTC for a part of the year.
  const isUtc = [0, 6].every((month) => new Date(new Date().getFullYear(), month).getTimezoneOffset() === 0);
  const two = (number) => String(number).padStart(2, "0");
  const clock = (at) => `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const day = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const utc = (at) => at.toISOString().slice(0, 19).replace("T", " ");

  function writeTimes(within) {
    if (isUtc) return;
    for (const time of within.querySelectorAll("time:not([data-local])")) {
      const at = new Date(time.dateTime);
      time.dataset.local = "1";
      const same = utc(at).slice(0, 10) === day(at);
      const beside = document.createElement("span");
      beside.className = "utc";
      beside.textContent = ` (UTC ${same ? utc(at).slice(11) : utc(at)})`;
      time.textContent = `${day(at)} ${clock(at)}`;
      time.append(beside);
    }
  }

  function writeZone(within) {
    const name = Intl.DateTimeFormat().resolvedOptions().timeZone;
    for (const field of within.querySelectorAll("input.zone")) field.value = name || "";
  }

  function announce() {
    const said = [...document.querySelectorAll("[data-announce]")]
      .map((part) => part.dataset.announce).join(". ");
    const live = document.getElementById("live");
    if (live.textContent !== said) live.textContent = said;
  }

  // --- whether the program answers --------------------------------------------------------

  const unanswered = new Set();

  function answered(what, isRight) {
    if (isRight) unanswered.delete(what);
    else unanswered.add(what);
    document.getElementById("lost").hidden = !unanswered.size;
  }

  // --- the chart -----------------------------------------------------------------------

  let chart = null, span = "", chosen = null, isDragged = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function sayRange(box, start, end, count) {
    // Only what differs is written: all of it is said, and the focus in it would be lost.
    const say = document.getElementById("range");
    const write = (where, words) => { if (where.textContent !== words) where.textContent = words; };
    if (start === null) {
      write(say, "Drag over the chart to choose a time.");
      return;
    }
    if (!say.querySelector("a")) {
      const all = document.createElement("button");
      all.type = "button";
      all.textContent = "Show all again";
      all.addEventListener("click", () => { chosen = null; draw(); });
      say.replaceChildren(document.createElement("a"), " ", all);
    }
    const link = say.querySelector("a"), from = new Date(start), to = new Date(end);
    // As one would type it; null for a time that no calendar has.
    link.href = `${box.dataset.base}/tasks?after=${from.toJSON()}&before=${to.toJSON()}`;
    write(link, `List the ${count.toLocaleString("en")} due from ${day(from)} ${clock(from)} to ${day(to)} ${clock(to)}`);
  }

  async function draw() {
    const box = document.getElementById("chart-box");
    if (!box || isDragged) return;
    const now = Date.now();
    const query = new URLSearchParams();
    if (chosen) { query.set("start", Math.round(chosen[0])); query.set("end", Math.round(chosen[1])); }
    else if (span) { query.set("start", now); query.set("end", now + Number(span)); }
    let forecast = null;
    try {
      const signal = AbortSignal.timeout(htmx.config.timeout);
      const answer = await fetch(`${box.dataset.base}/forecast?${query}`, { signal });
      if (answer.ok && !answer.redirected) forecast = await answer.json();
    } catch { /* It is said below. */ }
    answered("chart", forecast);
    if (!forecast || isDragged) return;
    const bars = forecast.counts.length;
    const place = document.getElementById("chart");
    if (!bars) {
      chart?.destroy();
      chart = null;
      place.textContent = forecast.nothing ? "No task waits yet." : forecast.error ? "The tasks cannot be read." : "Reading the tasks…";
      place.classList.add("blank");
      return;
    }
    place.classList.remove("blank");
    const width = (forecast.end - forecast.start) / bars;
    const data = [
      forecast.counts.map((_, index) => (forecast.start + (index + 0.5) * width) / 1000),
      forecast.counts,
    ];
    if (!chart || chart.isDark !== matchMedia("(prefers-color-scheme: dark)").matches) {
      if (chart) chart.destroy();
      place.textContent = "";
      const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--rail") }, ticks: { stroke: colour("--rail") } };
      chart = new uPlot({
        width: place.clientWidth, height: 220, legend: { show: false },
        cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false } },
        scales: { x: { time: true }, y: { range: (_, __, most) => [0, Math.max(most, 1) * 1.1] } },
        axes: [{ ...axis, space: 80, values: (_, marks, __, ___, step) => marks.map((mark, index) => {
          const at = new Date(mark * 1000);
          const hour = step < 60 ? clock(at) : clock(at).slice(0, 5);
          const isNew = index === 0 || day(at) !== day(new Date(marks[index - 1] * 1000));
          return step >= 86400 ? day(at) : isNew ? `${hour}\n${day(at)}` : hour;
        }) }, { ...axis, size: 60, values: (_, marks) => marks.map((mark) => Number.isInteger(mark) ? mark.toLocaleString("en") : "") }],
        series: [{}, { fill: colour("--bar"), stroke: colour("--bar"), points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 60] }) }],
        hooks: { setSelect: [(self) => {
          if (self.select.width < 5) return;
          chosen = [self.posToVal(self.select.left, "x") * 1000, self.posToVal(self.select.left + self.select.width, "x") * 1000];
          self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          draw();
        }] },
      }, data, place);
      chart.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    }
    chart.setData(data);
    chart.setScale("x", { min: forecast.start / 1000, max: forecast.end / 1000 });
    if (chosen) sayRange(box, forecast.start, forecast.end, forecast.counts.reduce((sum, count) => sum + count, 0));
    else sayRange(box, null);
  }

  // --- what happens when ---------------------------------------------------------------

  let selected = 0; // when somebody selected text last
  let focused = ""; // the HTML of what had the focus in a part

  function isSelected(part) {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(part, true) && Date.now() < selected + SELECTED;
  }

  const isBusy = (part) => isSelected(part) || part.contains(document.activeElement)
    && document.activeElement.matches("input:not([type=checkbox]):not([type=radio])")
    || part.querySelector("input[type=checkbox]:checked, input[value=all]:checked, input[name=when]:not(:placeholder-shown)");

  document.addEventListener("DOMContentLoaded", () => {
    writeTimes(document);
    writeZone(document);
    announce();
    document.documentElement.classList.add("scripted");
    document.body.addEventListener("change", (event) => {
      const box = event.target;
      const boxes = [...document.querySelectorAll("input[name=chosen]")];
      if (box.matches(".choose-all")) for (const task of boxes) task.checked = box.checked;
      else if (box.matches("input[name=chosen]")) {
        const all = document.querySelector(".choose-all");
        all.checked = boxes.every((task) => task.checked);
      }
    });
    document.getElementById("zone").textContent =
      isUtc ? "Times are in UTC." : `Times are in your zone, ${zone}, with UTC beside.`;
    document.addEventListener("selectionchange", () => { selected = Date.now(); });
    // What somebody is choosing in stays as it is.
    document.body.addEventListener("htmx:beforeRequest", (event) => {
      if (isBusy(event.detail.elt)) event.preventDefault();
    });
    document.body.addEventListener("htmx:beforeSwap", (event) => {
      const part = event.detail.elt, { xhr, pathInfo } = event.detail;
      if (isBusy(part)) event.detail.shouldSwap = false;
      // A site that the pages are mounted in may lead to its login instead.
      if (new URL(xhr.responseURL).pathname !== new URL(pathInfo.requestPath, location).pathname) {
        event.detail.shouldSwap = false;
        event.detail.isError = true;
      }
      focused = part.contains(document.activeElement) ? document.activeElement.outerHTML : "";
    });
    document.body.addEventListener("htmx:afterSwap", (event) => {
      const part = event.detail.target;
      const same = [...part.querySelectorAll("a, button, input")].find((control) => control.outerHTML === focused);
      same?.focus({ preventScroll: true });
      writeTimes(part);
      writeZone(part);
      announce();
    });
    document.body.addEventListener("htmx:afterRequest", (event) => answered(event.detail.elt.id, event.detail.successful));
    for (const button of document.querySelectorAll("[data-span]")) {
      button.addEventListener("click", () => {
        span = button.dataset.span;
        chosen = null;
        for (const other of document.querySelectorAll("[data-span]")) other.setAttribute("aria-pressed", other === button);
        draw();
      });
    }
    document.getElementById("chart")?.addEventListener("mousedown", () => { isDragged = true; }, true);
    addEventListener("mouseup", () => { isDragged = false; }, true);
    addEventListener("resize", () => {
      if (chart) chart.setSize({ width: document.getElementById("chart").clientWidth, height: 220 });
    });
    draw();
    setInterval(() => {
      if (document.visibilityState !== "visible") return;
      htmx.trigger(document.body, "tick");
      draw();
    }, EVERY);
  });
})();
