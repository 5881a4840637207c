"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const hidden = {}; // by comparison, the numbers of the methods that are not shown
  const drawn = new Set();
  let printing = false;

  // -- theme --------------------------------------------------------------------------------------------

  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("flatfed-theme"); } catch { /* storage may be forbidden */ }
  const apply = () => {
    root.dataset.theme = printing ? "light" : chosen ?? (system.matches ? "dark" : "light");
  };
  apply();
  system.addEventListener("change", () => { apply(); redraw(); });
  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("flatfed-theme", chosen); } catch { /* then it is forgotten */ }
    apply();
    redraw();
  });
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // -- figures ------------------------------------------------------------------------------------------

  // plotly reads a little HTML in texts; names are to be shown as they are.
  const literal = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%{", "% {");
  const faded = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

  function band(trace, hue, logarithmic) {
    const pairs = trace.x.map((x, place) => [x, trace.y[place], trace.meta.deviation[place]]);
    // A few hundred corners are all that shows, and many more are slow to draw.
    const step = Math.ceil(pairs.length / 300);
    const known = pairs.filter(([, y, deviation], place) =>
      y !== null && deviation !== null && (place % step === 0 || place === pairs.length - 1));
    // A logarithmic axis has no zero; the axis ends far above this.
    const low = known.map(([, y, deviation]) => (logarithmic ? Math.max(y - deviation, 1e-12) : y - deviation));
    return {
      type: "scatter", mode: "lines", fill: "toself", fillcolor: faded(hue, 0.16), line: { width: 0 },
      hoverinfo: "skip", showlegend: false,
      x: [...known.map(([x]) => x), ...known.map(([x]) => x).reverse()],
      y: [...known.map(([, y, deviation]) => y + deviation), ...low.reverse()],
    };
  }

  function painted(spec) {
    const bands = [], lines = [];
    for (const trace of spec.data) {
      const { method, series, deviation, ramp, points } = trace.meta;
      if (method !== null && hidden[spec.part]?.has(method)) continue;
      const copy = { ...trace, name: literal(trace.name) };
      const index = method ?? series ?? 0;
      const hue = colour(`c${index % 7}`);
      if (trace.type === "surface" && !ramp) {
        copy.colorscale = [[0, hue], [1, hue]];
        copy.showlegend = true;
      } else if (ramp) {
        const flat = trace.type === "heatmap";
        copy.colorscale = flat ? [0, 1, 2, 3].map((step) => [step / 3, colour(`ramp${step}`)]) : "Viridis";
        if (copy.colorbar) copy.colorbar = { ...copy.colorbar, tickfont: { color: colour("soft") } };
      } else if (points) {
        copy.hovertext = trace.hovertext.map(literal);
        copy.marker = { color: "#ffffff", size: 9, line: { color: "#111111", width: 2 } };
        copy.textfont = { color: "#ffffff", size: 12, shadow: "0 0 3px #000, 0 0 3px #000" };
      } else if (trace.type === "box") {
        copy.y = trace.y.map(literal);
        copy.line = { color: hue, width: 1.5 };
        copy.fillcolor = faded(hue, 0.18);
        copy.boxmean = true;
        copy.width = 0.55;
      } else {
        copy.line = { dash: dashes[Math.floor(index / 7) % 4], ...trace.line, color: hue, width: 2 };
        copy.marker = { color: hue, size: 6 };
        if (spec.layout.yaxis?.type === "log") copy.y = trace.y.map((y) => (y > 0 ? y : null));
        const [, x, y] = spec.columns.map(literal);
        copy.hovertemplate = `<b>%{fullData.name}</b><br>${x}: %{x:.4~g}<br>${y}: %{y:.4~g}`;
        if (deviation) {
          copy.customdata = deviation;
          copy.hovertemplate += " ± %{customdata:.2~g}";
          bands.push(band(trace, hue, spec.layout.yaxis?.type === "log"));
        }
        copy.hovertemplate += "<extra></extra>";
      }
      lines.push(copy);
    }
    return [...bands, ...lines];
  }

  function axis(given) {
    const title = given?.title?.text ?? "";
    return {
      gridcolor: colour("grid"), zerolinecolor: colour("line"), linecolor: colour("line"), tickcolor: colour("line"),
      automargin: true, ticks: "outside", ticklen: 3, nticks: 8, minexponent: 4, exponentformat: "power", ...given,
      title: { text: literal(title), font: { size: 12, color: colour("soft") }, standoff: 8 },
      tickfont: { color: colour("soft"), size: 11 },
    };
  }

  function laidOut(spec, box) {
    const kinds = new Set(spec.data.map((trace) => trace.type));
    const boxes = new Set(spec.data.filter((trace) => trace.type === "box").map((trace) => trace.name)).size;
    const classes = kinds.has("heatmap") ? spec.data[0].y.length : 0;
    const narrow = box.clientWidth < 420;
    const named = spec.layout.showlegend ? 12 * spec.data.length : 0;
    const layout = {
      ...spec.layout,
      height: named + (boxes ? 90 + 38 * boxes : classes ? Math.max(240, 90 + 16 * classes) : narrow ? 260 : 300),
      margin: { l: 8, r: 14, t: 14, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 }, align: "left" },
      showlegend: spec.layout.showlegend ?? false,
      legend: { orientation: "h", y: -0.28, font: { color: colour("soft") } },
      // Dragging would take the finger that wants to scroll.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hovermode: "closest",
    };
    if (printing) layout.width = box.closest("figure:last-child:nth-child(odd)") ? 640 : 305;
    if (kinds.has("surface")) {
      const kept = box.layout?.scene?.camera;
      layout.margin = { l: 0, r: 0, t: 0, b: 0 };
      layout.dragmode = "turntable";
      layout.scene = { aspectmode: "cube", camera: kept ?? { eye: { x: 1.6, y: 1.6, z: 1.05 }, center: { x: 0, y: 0, z: -0.22 } } };
      for (const name of ["xaxis", "yaxis", "zaxis"]) {
        const given = axis(spec.layout.scene[name]);
        delete given.automargin;
        delete given.title.standoff;
        layout.scene[name] = { ...given, nticks: 5, showbackground: false, showspikes: false };
      }
    } else {
      layout.xaxis = axis(spec.layout.xaxis);
      layout.yaxis = axis(spec.layout.yaxis);
      if (kinds.has("heatmap")) for (const name of ["xaxis", "yaxis"]) layout[name] = { ...layout[name], showgrid: false, zeroline: false };
      if (layout.xaxis.type !== "log") layout.xaxis.exponentformat = "SI";
      if (classes && classes <= 20) layout.yaxis.dtick = 1;
      if (boxes) layout.yaxis = { ...layout.yaxis, autorange: "reversed", ticks: "", nticks: 0, showgrid: false };
    }
    return layout;
  }

  // One figure that cannot be drawn must not cost the others.
  async function draw(figure) {
    try {
      await plot(figure);
      figure.dataset.drawn = "yes";
    } catch (error) {
      console.warn(figure.dataset.figure, error);
      figure.querySelector(".plot").textContent = "This figure could not be drawn.";
      figure.dataset.drawn = "no";
    }
  }

  function plot(figure) {
    const spec = figures[figure.dataset.figure];
    const box = figure.querySelector(".plot");
    const options = { responsive: true, displayModeBar: false, displaylogo: false };
    const done = Plotly.react(box, painted(spec), laidOut(spec, box), options);
    if (!drawn.has(figure)) {
      drawn.add(figure);
      if (spec.layout.scene) box.on("plotly_relayout", (change) => turn(figure, spec.part, change["scene.camera"]));
    }
    return done;
  }

  let turning = false;
  function turn(source, part, camera) {
    if (!camera || turning) return;
    turning = true;
    const others = [...drawn].filter((each) => each !== source);
    const scenes = others.filter((each) => figures[each.dataset.figure].part === part && figures[each.dataset.figure].layout.scene);
    Promise.all(scenes.map((each) => Plotly.relayout(each.querySelector(".plot"), { "scene.camera": camera })))
      .finally(() => { turning = false; });
  }

  function redraw(part) {
    for (const figure of drawn) {
      if (part === undefined || figures[figure.dataset.figure].part === part) draw(figure);
    }
  }

  async function unpack() {
    const packed = await fetch("data:application/octet-stream;base64," + document.getElementById("plotly").textContent);
    const stream = packed.body.pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  const waiting = [...document.querySelectorAll("figure[data-figure]")];
  unpack().then(() => {
    // One at a time, so that the page stays quick to the touch.
    const queue = [];
    const next = () => {
      const figure = queue.shift();
      if (!drawn.has(figure)) draw(figure);
      if (queue.length) setTimeout(next);
    };
    const observer = new IntersectionObserver((entries) => {
      const seen = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
      if (seen.length && !queue.length) setTimeout(next);
      queue.push(...seen);
      seen.forEach((figure) => observer.unobserve(figure));
    }, { rootMargin: "600px" });
    waiting.forEach((figure) => observer.observe(figure));
    let closed = [];
    addEventListener("beforeprint", () => {
      printing = true;
      apply();
      closed = [...document.querySelectorAll("details:not([open])")];
      closed.forEach((each) => { each.open = true; });
      waiting.forEach(draw);
    });
    addEventListener("afterprint", () => {
      printing = false;
      closed.forEach((each) => { each.open = false; });
      apply();
      redraw();
    });
  }, () => {
    for (const figure of waiting) figure.querySelector(".plot").textContent = "This browser is too old to draw the figures.";
  });

  for (const legend of document.querySelectorAll(".legend")) {
    const whole = legend.closest(".part");
    const part = Number(whole.dataset.part);
    hidden[part] = new Set();
    legend.addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (!button) return;
      const method = Number(button.dataset.method);
      const off = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!off));
      off ? hidden[part].add(method) : hidden[part].delete(method);
      for (const figure of whole.querySelectorAll(`figure[data-method="${method}"]`)) figure.hidden = off;
      for (const row of whole.querySelectorAll("tbody tr")) {
        if (row.cells[0].textContent === button.textContent) row.hidden = off;
      }
      redraw(part);
    });
  }

  // -- tables -------------------------------------------------------------------------------------------

  function sort(header) {
    const table = header.closest("table"), body = table.tBodies[0];
    const column = header.cellIndex;
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const each of table.tHead.rows[0].cells) each.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value;
    const rows = [...body.rows];
    const numeric = rows.every((row) => value(row) === undefined || !Number.isNaN(Number(value(row))));
    rows.sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return direction * (numeric ? Number(a) - Number(b) : a.localeCompare(b));
    });
    body.append(...rows);
  }
  for (const header of document.querySelectorAll("th")) header.addEventListener("click", () => sort(header));

  // -- downloads ----------------------------------------------------------------------------------------

  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = (rows) => rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";

  function markdown([header, ...rows]) {
    const row = (cells) => `| ${cells.map((text) => text.replaceAll("\\", "\\\\").replaceAll("|", "\\|")).join(" | ")} |`;
    const rule = `|${header.map((_, place) => (place ? "---:" : ":---")).join("|")}|`;
    return [row(header), rule, ...rows.map(row)].join("\n") + "\n";
  }

  const special = {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "–": "--",
    "×": "$\\times$", "→": "$\\to$", "−": "$-$", "α": "$\\alpha$", "ρ": "$\\rho$", "η": "$\\eta$",
  };
  const latexText = (text) => text.replace(/[\\~^±–×→−αρη&%$#_{}]/g, (each) => special[each] ?? `\\${each}`);
  function latex([header, ...rows]) {
    const row = (cells) => `  ${cells.map(latexText).join(" & ")} \\\\`;
    const columns = header.map((_, place) => (place ? "r" : "l")).join("");
    return [
      "% needs \\usepackage{booktabs}", `\\begin{tabular}{${columns}}`, "  \\toprule", row(header), "  \\midrule",
      ...rows.map(row), "  \\bottomrule", "\\end{tabular}", "",
    ].join("\n");
  }

  function figureRows(spec) {
    const rows = [];
    const spread = spec.data.some((trace) => trace.meta.deviation);
    for (const trace of spec.data) {
      if (trace.type === "box") {
        const sizes = ["lowerfence", "q1", "median", "q3", "upperfence", "mean"];
        rows.push([trace.name, ...sizes.map((size) => trace[size][0])]);
      } else if (trace.z) {
        const cells = trace.type === "heatmap" ? trace.text : trace.z;
        const named = spec.columns.length === 4 ? [trace.name] : [];
        trace.y.forEach((y, down) => trace.x.forEach((x, across) => rows.push([...named, x, y, cells[down][across]])));
      } else {
        const more = trace.meta.points ? trace.customdata : spread ? trace.meta.deviation ?? [] : null;
        trace.x.forEach((x, place) => {
          rows.push([trace.hovertext?.[place] ?? trace.name, x, trace.y[place], ...(more ? [more[place]] : [])]);
        });
      }
    }
    return [[...spec.columns, ...(spread ? ["standard deviation"] : [])], ...rows];
  }

  function save(name, text, kind = "text/plain") {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: `${kind};charset=utf-8` }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-save]");
    if (!button) return;
    const kind = button.dataset.save;
    const figure = button.closest("figure"), table = button.closest(".table");
    if (kind === "toml") {
      save(`${button.dataset.name.replace(/[^\w.-]+/g, "-")}.toml`, button.closest("details").querySelector("pre").textContent);
    } else if (figure) {
      const spec = figures[figure.dataset.figure];
      if (kind === "csv") save(`${spec.name}.csv`, csv(figureRows(spec)), "text/csv");
      else draw(figure).then(() => Plotly.downloadImage(figure.querySelector(".plot"), { format: "svg", filename: spec.name }));
    } else {
      const rows = [...table.querySelectorAll("tr")].map((row) => [...row.cells].map((each) => each.textContent.trim().replace(/\s+/g, " ")));
      save(`${table.dataset.name}.${kind}`, { csv, md: markdown, tex: latex }[kind](rows));
    }
  });
})();
