// Browsers start no Worker for a page that was opened from disk; the search then runs in a hidden frame.
if (window.location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      const script = inner.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.inner = inner;
        this.waiting.forEach((data) => this.postMessage(data));
      };
      inner.document.body.appendChild(script);
    }

    postMessage(data) {
      if (this.inner) {
        this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
      } else {
        this.waiting.push(data);
      }
    }

    terminate() {}
  }
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
