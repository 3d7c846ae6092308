// Many circles on a canvas, for the map's page and for the explorer. WebGL2 draws them out of sight and the canvas shows a
// copy: so it prints like any picture, and can draw the same one itself wherever WebGL2 is missing, lost or too limited.

const FARTHEST = 80;
const FAINT = 0.18;
const LINES = { opacity: 0.95, wide: 3.5, narrow: 1.75 };
const LEVELS = 65535;
const BANDS = 256;

const VERTEX = `#version 300 es
layout(location = 0) in vec2 place;
layout(location = 1) in float share;
layout(location = 2) in vec4 paint;
uniform vec2 centre, corner, radius, opacity;
uniform vec3 ghost;
uniform float span, faintRadius, line;
flat out vec4 colour;
flat out vec2 sizes;
void main() {
  bool seen = paint.a > 0.0;
  float r = seen ? mix(radius.x, radius.y, share) : faintRadius;
  sizes = vec2(r, 2.0 * r + line + 1.0);
  colour = seen ? vec4(paint.rgb, mix(opacity.x, opacity.y, share)) : vec4(ghost, ${FAINT});
  gl_PointSize = sizes.y;
  gl_Position = vec4((place - centre) * span / corner, 0, 1);
}`;

const DISC = `#version 300 es
precision highp float;
flat in vec4 colour;
flat in vec2 sizes;
out vec4 pixel;
void main() {
  float away = length(gl_PointCoord - 0.5) * sizes.y;
  float alpha = colour.a * clamp(sizes.x + 0.5 - away, 0.0, 1.0);
  pixel = vec4(colour.rgb * alpha, alpha);
}`;

const RING = `#version 300 es
precision highp float;
uniform vec3 paper;
uniform float line;
flat in vec4 colour;
flat in vec2 sizes;
out vec4 pixel;
void main() {
  float away = abs(length(gl_PointCoord - 0.5) * sizes.y - sizes.x);
  vec2 widths = vec2(1.0, ${LINES.narrow / LINES.wide}) * line;
  vec2 alpha = ${LINES.opacity} * clamp(widths / 2.0 + 0.5 - away, 0.0, 1.0);
  alpha.x *= 1.0 - alpha.y;
  pixel = vec4(paper * alpha.x + colour.rgb * alpha.y, alpha.x + alpha.y);
}`;

const dab = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

/** Red, green and blue, 0 to 255, of any colour that CSS can name. */
export const rgb = (css) => {
  dab.fillStyle = css;
  dab.fillRect(0, 0, 1, 1);
  return [...dab.getImageData(0, 0, 1, 1).data.subarray(0, 3)];
};

const mix = ([low, high], share) => low + (high - low) * share;
const level = (share) => Math.round((1 - share) * LEVELS);
const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;

/** The buffers and programs of a WebGL2 context. */
class Shaders {
  constructor(gl) {
    this.gl = gl;
    this.largest = gl.getParameter(gl.ALIASED_POINT_SIZE_RANGE)[1];
    this.programs = [DISC, RING].map((fragment) => this.#program(fragment));
    this.buffers = ["xy", "shares", "paint", "indices"].map(() => gl.createBuffer());
    const layout = [[2, gl.FLOAT, false], [1, gl.FLOAT, false], [4, gl.UNSIGNED_BYTE, true]];
    layout.forEach(([parts, type, normalised], slot) => {
      gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[slot]);
      gl.enableVertexAttribArray(slot);
      gl.vertexAttribPointer(slot, parts, type, normalised, 0, 0);
    });
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, this.buffers[3]);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  #program(fragment) {
    const gl = this.gl;
    const program = gl.createProgram();
    for (const [type, text] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, fragment]]) {
      const shader = gl.createShader(type);
      gl.shaderSource(shader, text);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    return program;
  }

  load(slot, values) {
    const target = slot === 3 ? this.gl.ELEMENT_ARRAY_BUFFER : this.gl.ARRAY_BUFFER;
    this.gl.bindBuffer(target, this.buffers[slot]);
    this.gl.bufferData(target, values, this.gl.DYNAMIC_DRAW);
  }

  /** Draw discs and then rings, `counts` of each, with these numbers as uniforms. */
  draw([width, height], margin, counts, uniforms) {
    const gl = this.gl;
    if (gl.canvas.width !== width || gl.canvas.height !== height) [gl.canvas.width, gl.canvas.height] = [width, height];
    // Circles are dropped with their centres: so what is drawn is wider than what is shown.
    gl.viewport(-margin, -margin, width + 2 * margin, height + 2 * margin);
    gl.clear(gl.COLOR_BUFFER_BIT);
    this.programs.forEach((program, which) => {
      gl.useProgram(program);
      for (const [name, value] of Object.entries(uniforms)) {
        const numbers = [value].flat();
        gl[`uniform${numbers.length}fv`](gl.getUniformLocation(program, name), numbers);
      }
      if (which === 0) gl.uniform1f(gl.getUniformLocation(program, "line"), 0);
      gl.drawElements(gl.POINTS, counts[which], gl.UNSIGNED_INT, which * 4 * counts[0]);
    });
  }
}

export class Points {
  /** What is looked at: the map moved by x and y, in its own unit, and `scale` times as large as the canvas. */
  view = { x: 0, y: 0, scale: 1 };
  /** The canvas on the page, in pixels, and how much smaller circles are if it is small; `resize` updates them. */
  width = 0;
  height = 0;
  shrink = 1;

  #canvas;
  #brush;
  #shaders = null;
  #waiting = 0;
  #stale = new Set();
  #order = new Uint32Array(0);
  #indices = new Uint32Array(0);
  #ghosts = 0;
  #rings = 0;
  #middle = [0.5, 0.5];
  #extent = [1, 1];
  #all = {
    xy: new Float32Array(0),
    shares: new Float32Array(0),
    colours: new Uint8Array(0),
    mask: new Uint8Array(0),
    ringed: new Uint32Array(0),
    paper: [255, 255, 255],
    ghost: [185, 182, 174],
    radius: [1, 4],
    opacity: [0.9, 0.2],
  };

  constructor(canvas) {
    this.#canvas = canvas;
    this.#brush = canvas.getContext("2d");
    const gl = document.createElement("canvas").getContext("webgl2", { antialias: false, depth: false });
    const begin = () => {
      this.#shaders = gl === null || gl.isContextLost() ? null : new Shaders(gl);
      this.set(this.#all);
      this.draw();
    };
    gl?.canvas.addEventListener("webglcontextlost", (event) => {
      event.preventDefault();
      begin();
    });
    gl?.canvas.addEventListener("webglcontextrestored", begin);
    begin();
    this.resize();
  }

  /**
   * Any of these; the others stay as they are. `draw` shows them.
   *   xy        Float32Array(2n), x to the right, y down; at scale 1 all points just fit into the canvas
   *   shares    Float32Array(n) of uncertainty, 0 to 1 (NaN: 0): the larger, the larger and more transparent the circle
   *   colours   Uint8Array(3n)
   *   mask      Uint8Array(n); 0 is a ghost: small, grey, faint, behind all others, and never picked
   *   ringed    Uint32Array(k), the points with a ring
   *   paper     [red, green, blue] below the rings; ghost: of the ghosts
   *   radius    [of share 0, of share 1], in pixels at scale 1; opacity: likewise, 0 to 1
   */
  set(parts) {
    const all = Object.assign(this.#all, parts);
    const n = all.xy.length / 2;
    for (const name of Object.keys(parts)) this.#stale.add(name);
    for (const [name, each, value] of [["shares", 1, 0], ["colours", 3, 128], ["mask", 1, 1]]) {
      if (all[name].length === each * n) continue;
      all[name] = new all[name].constructor(each * n).fill(value);
      this.#stale.add(name);
    }
    if ("shares" in parts) all.shares = parts.shares.map((share) => (share > 0 ? Math.min(share, 1) : 0));
    if ("xy" in parts) this.#measure();
  }

  /** Take over the size that the canvas has on the page. */
  resize() {
    [this.width, this.height] = [this.#canvas.clientWidth, this.#canvas.clientHeight];
    this.shrink = Math.min(1, Math.max(0.5, Math.min(this.width, this.height) / 600));
    this.draw();
  }

  /** Draw in the next frame. */
  draw() {
    this.#waiting ||= requestAnimationFrame(() => this.#paint());
  }

  /** Move the map by pixels. */
  pan(dx, dy) {
    this.view.x += dx / this.#span;
    this.view.y += dy / this.#span;
    this.draw();
  }

  /** Make the map larger by a factor, but for what is at a pixel; it is never smaller than the canvas, and a factor of 0 shows it whole. */
  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const [x, y] = this.toMap(px, py);
    this.view.scale = Math.min(FARTHEST, Math.max(1, this.view.scale * factor));
    const [nowX, nowY] = this.toMap(px, py);
    this.view.x += nowX - x;
    this.view.y += nowY - y;
    if (this.view.scale === 1) [this.view.x, this.view.y] = [0, 0];
    this.draw();
  }

  /** Pixels of a place on the map. */
  project(x, y) {
    return [
      this.width / 2 + (x - this.#middle[0] + this.view.x) * this.#span,
      this.height / 2 + (y - this.#middle[1] + this.view.y) * this.#span,
    ];
  }

  toScreen(i) {
    return this.project(this.#all.xy[2 * i], this.#all.xy[2 * i + 1]);
  }

  toMap(px, py) {
    return [
      (px - this.width / 2) / this.#span + this.#middle[0] - this.view.x,
      (py - this.height / 2) / this.#span + this.#middle[1] - this.view.y,
    ];
  }

  /** Radius of a circle on the screen. */
  size(i) {
    return mix(this.#all.radius, this.#all.shares[i]) * this.#growth;
  }

  /** The point whose centre is nearest, among circles under the pixel or `reach` pixels away; -1 if there is none. */
  pick(px, py, reach = 0) {
    const { xy, shares, mask, radius } = this.#all;
    const [x, y] = this.toMap(px, py);
    const least = (radius[0] * this.#growth + reach) / this.#span;
    const more = ((radius[1] - radius[0]) * this.#growth) / this.#span;
    let best = -1;
    let nearest = Infinity;
    for (let i = 0; i < mask.length; i += 1) {
      const dx = xy[2 * i] - x;
      const dy = xy[2 * i + 1] - y;
      const away = dx * dx + dy * dy;
      if (away >= nearest || mask[i] === 0 || away >= (least + more * shares[i]) ** 2) continue;
      best = i;
      nearest = away;
    }
    return best;
  }

  /** 1 for every point inside a polygon of places on the map, [[x, y], ...]; where it crosses itself, by the even-odd rule. */
  inside(polygon) {
    const { xy, mask } = this.#all;
    const chosen = new Uint8Array(mask.length);
    const [xs, ys] = [0, 1].map((axis) => polygon.map((corner) => corner[axis]));
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    // A point is compared only with the edges that pass its own horizontal band.
    const band = (y) => Math.min(BANDS - 1, Math.floor(((y - top) / (bottom - top)) * BANDS));
    const edges = Array.from({ length: BANDS }, () => []);
    polygon.forEach(([bx, by], place) => {
      const [ax, ay] = polygon.at(place - 1);
      if (ay === by) return;
      for (let at = band(Math.min(ay, by)); at <= band(Math.max(ay, by)); at += 1) edges[at].push(ax, ay, bx, by);
    });
    for (let i = 0; i < mask.length; i += 1) {
      const x = xy[2 * i];
      const y = xy[2 * i + 1];
      if (!(x >= left && x <= right && y >= top && y < bottom)) continue;
      const near = edges[band(y)];
      for (let k = 0; k < near.length; k += 4) {
        const ay = near[k + 1];
        const by = near[k + 3];
        if (ay > y !== by > y && x < near[k] + ((y - ay) / (by - ay)) * (near[k + 2] - near[k])) chosen[i] ^= 1;
      }
    }
    return chosen;
  }

  /** Pixels of the map's unit. */
  get #span() {
    return 0.92 * Math.min(this.width / this.#extent[0], this.height / this.#extent[1]) * this.view.scale;
  }

  /** Circles grow more slowly than the map. */
  get #growth() {
    return this.shrink * Math.sqrt(this.view.scale);
  }

  #measure() {
    const xy = this.#all.xy;
    const [low, high] = [[Infinity, Infinity], [-Infinity, -Infinity]];
    for (let k = 0; k < xy.length; k += 1) {
      if (xy[k] < low[k & 1]) low[k & 1] = xy[k];
      if (xy[k] > high[k & 1]) high[k & 1] = xy[k];
    }
    if (xy.length === 0) return;
    this.#middle = low.map((least, axis) => (least + high[axis]) / 2);
    const extent = low.map((least, axis) => high[axis] - least);
    const longest = Math.max(...extent) || 1;
    this.#extent = extent.map((one) => Math.max(one, 0.01 * longest));
  }

  /** The uncertain ones first, so that the certain ones stay visible on top of them. */
  #sort() {
    const shares = this.#all.shares;
    const starts = new Uint32Array(LEVELS + 2);
    for (let i = 0; i < shares.length; i += 1) starts[level(shares[i]) + 1] += 1;
    for (let k = 1; k < starts.length; k += 1) starts[k] += starts[k - 1];
    this.#order = new Uint32Array(shares.length);
    for (let i = 0; i < shares.length; i += 1) {
      const at = level(shares[i]);
      this.#order[starts[at]] = i;
      starts[at] += 1;
    }
  }

  /** What is drawn after what: ghosts, then the others, then rings. */
  #arrange() {
    const { mask, ringed } = this.#all;
    const n = mask.length;
    this.#indices = new Uint32Array(n + ringed.length);
    this.#ghosts = 0;
    for (let i = 0; i < n; i += 1) if (mask[i] === 0) this.#ghosts += 1;
    let [back, front] = [0, this.#ghosts];
    for (let k = 0; k < n; k += 1) {
      const i = this.#order[k];
      if (mask[i] === 0) this.#indices[back++] = i;
      else this.#indices[front++] = i;
    }
    for (const i of ringed) if (mask[i] !== 0) this.#indices[front++] = i;
    this.#rings = front - n;
  }

  /** Sort and hand to WebGL2 what has changed since the last frame. */
  #refresh() {
    const { xy, shares, colours, mask } = this.#all;
    const changed = (...names) => names.some((name) => this.#stale.has(name));
    if (changed("shares")) this.#sort();
    if (changed("shares", "mask", "ringed")) this.#arrange();
    if (this.#shaders !== null) {
      if (changed("xy")) this.#shaders.load(0, xy);
      if (changed("shares")) this.#shaders.load(1, shares);
      if (changed("colours", "mask")) {
        const paint = new Uint8Array(4 * mask.length);
        for (let i = 0; i < mask.length; i += 1) {
          for (let part = 0; part < 3; part += 1) paint[4 * i + part] = colours[3 * i + part];
          paint[4 * i + 3] = mask[i];
        }
        this.#shaders.load(2, paint);
      }
      if (changed("shares", "mask", "ringed")) this.#shaders.load(3, this.#indices);
    }
    this.#stale.clear();
  }

  #paint() {
    this.#waiting = 0;
    const dense = window.devicePixelRatio || 1;
    const sides = [Math.round(this.width * dense), Math.round(this.height * dense)];
    if (sides.includes(0)) return;
    if (this.#canvas.width !== sides[0] || this.#canvas.height !== sides[1]) [this.#canvas.width, this.#canvas.height] = sides;
    this.#refresh();
    this.#brush.resetTransform();
    this.#brush.globalAlpha = 1;
    this.#brush.clearRect(0, 0, ...sides);
    const widest = dense * (2 * Math.max(...this.#all.radius) * this.#growth + LINES.wide) + 1;
    if (this.#shaders === null || widest > this.#shaders.largest) {
      this.#brush.scale(dense, dense);
      this.#paintHere();
    } else {
      this.#paintApart(sides, dense, Math.ceil(widest / 2));
      this.#brush.drawImage(this.#shaders.gl.canvas, 0, 0);
    }
  }

  #paintApart([width, height], dense, margin) {
    const { radius, opacity, ghost, paper, mask } = this.#all;
    this.#shaders.draw([width, height], margin, [mask.length, this.#rings], {
      centre: this.toMap(this.width / 2, this.height / 2),
      corner: [width / 2 + margin, -(height / 2 + margin)],
      span: this.#span * dense,
      radius: radius.map((one) => one * this.#growth * dense),
      faintRadius: radius[0] * this.shrink * dense,
      line: LINES.wide * dense,
      opacity,
      ghost: ghost.map((part) => part / 255),
      paper: paper.map((part) => part / 255),
    });
  }

  #paintHere() {
    const { colours, shares, opacity, radius, ghost, paper, mask } = this.#all;
    const brush = this.#brush;
    const own = (i) => css(colours.subarray(3 * i, 3 * i + 3));
    const circle = (i, r) => {
      const [x, y] = this.toScreen(i);
      const [dx, dy] = [this.width / 2 - Math.abs(x - this.width / 2), this.height / 2 - Math.abs(y - this.height / 2)];
      brush.beginPath();
      if (dx > -r && dy > -r) brush.arc(x, y, r, 0, 2 * Math.PI);
    };
    this.#indices.subarray(0, mask.length + this.#rings).forEach((i, place) => {
      const ring = place >= mask.length;
      const faint = place < this.#ghosts;
      circle(i, faint ? radius[0] * this.shrink : this.size(i));
      if (!ring) {
        brush.globalAlpha = faint ? FAINT : mix(opacity, shares[i]);
        brush.fillStyle = faint ? css(ghost) : own(i);
        brush.fill();
        return;
      }
      brush.globalAlpha = LINES.opacity;
      for (const [wide, shade] of [[LINES.wide, css(paper)], [LINES.narrow, own(i)]]) {
        Object.assign(brush, { lineWidth: wide, strokeStyle: shade });
        brush.stroke();
      }
    });
  }
}
